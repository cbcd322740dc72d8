"""What a client gets when its request cannot be answered: an HTTP status and the body that OpenAI's clients understand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ApiError(Exception):
    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def overloaded(message: str, retry_after_s: int) -> ApiError:
    return ApiError(
        429,
        message,
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(retry_after_s)},
    )


def unavailable(message: str) -> ApiError:
    return ApiError(503, message, kind="service_unavailable_error", headers={"Retry-After": "5"})


def timed_out(message: str) -> ApiError:
    return ApiError(504, message, kind="timeout_error", code="request_timeout")


def failed(message: str) -> ApiError:
    return ApiError(500, message, kind="server_error")
