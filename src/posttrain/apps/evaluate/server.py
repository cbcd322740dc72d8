"""A server with OpenAI's API as the model under evaluation: requests, retries, and what its replies mean."""

from __future__ import annotations

import os
import queue
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from posttrain.config.evaluation import OpenAiConfig
from posttrain.engines.native.noise import sequence_key
from posttrain.errors import InputError
from posttrain.files.redaction import CREDENTIAL_REMEDY, lacks_credential, redact
from posttrain.roles import Progress
from posttrain.types import Completion, NoiseKey, Sampling, Task

if TYPE_CHECKING:
    import httpx

_RETRIED = {408, 409, 425, 429, 500, 502, 503, 504, 529}
_REFUSED = {401, 403, 404, 405}  # of every request: a wrong key, name or address
_MAX_WAIT_S = 60.0
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class ServedCompletion(Completion):
    """An answer as text: a server gives no token ids."""

    num_tokens: int | None = None  # as the server counts them; None if it does not


@dataclass
class OpenAiServer:
    """A `roles.Engine`: OpenAI's chat or text completions, through a bounded number of connections.

    A request that failed after all attempts is a completion with `error`: it stays unscored and is never a wrong
    answer.
    """

    url: str
    config: OpenAiConfig
    first_wait_s: float = 0.5  # before the second attempt; doubles each time
    model: str = ""
    _client: Any = field(default=None, repr=False)
    _is_refused: threading.Event = field(default_factory=threading.Event, repr=False)
    _stopped: threading.Event = field(default_factory=threading.Event, repr=False)

    def __post_init__(self) -> None:
        try:
            import httpx
        except ImportError as error:
            raise InputError(f"evaluating a server needs httpx ({error}): pip install 'posttrain[eval]'") from error
        self.url = self.url.rstrip("/")
        if lacks_credential(self.url):
            raise InputError(f"{self.url}: its password was left out of the file; {CREDENTIAL_REMEDY}")
        key = os.environ.get(self.config.api_key_env_var)
        self._client = httpx.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(self.config.timeout_s, connect=min(30.0, self.config.timeout_s)),
            limits=httpx.Limits(max_connections=self.config.num_concurrent),
        )
        self.model = self.config.model or self._first_model()

    def _first_model(self) -> str:
        """Also checks that a server answers, before time is spent on retries."""
        import httpx

        try:
            reply = self._client.get(f"{self.url}/models", timeout=30.0)
            reply.raise_for_status()
            listed = reply.json()["data"]
            return str(listed[0]["id"])
        except httpx.HTTPStatusError as error:
            raise InputError(
                f"{self.url}/models: {_status_and_text(error.response)}; {self._advice(error.response.status_code)}"
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise InputError(
                f"{self.url}: no answer ({_named(error)}); is the server there? A finished evaluation is summarised "
                "without it if generation.openai_cfg.model names its model"
            ) from error
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise InputError(
                f"{self.url}/models lists no model; the address of an OpenAI-compatible API usually ends in /v1, "
                "and generation.openai_cfg.model names the model"
            ) from error

    def _advice(self, status: int) -> str:
        if status in (401, 403):
            return f"put the key into the environment variable {self.config.api_key_env_var}"
        return "the address of an OpenAI-compatible API usually ends in /v1"

    def generate(
        self,
        tasks: Sequence[Task],
        num_samples: int,
        sampling: Sampling,
        key: NoiseKey,
        progress: Progress | None = None,
    ) -> list[list[Completion]]:
        def one(place: tuple[Task, int]) -> Completion:
            found = self._ask(*self._request(*place, sampling, key))
            if progress is not None and not self._stopped.is_set():
                progress(1)
            return found

        places = [(task, sample) for task in tasks for sample in range(num_samples)]
        try:
            answers = _in_threads(one, places, self.config.num_concurrent)
        except BaseException:
            self._stopped.set()  # wakes those that wait for their next attempt
            raise
        if all(answer.error is not None for answer in answers):
            raise InputError(
                f"{self.url}: none of {len(answers)} requests was answered ({answers[0].error}); what was finished "
                "before is saved, and the same command resumes"
            )
        return [answers[start : start + num_samples] for start in range(0, len(answers), num_samples)]

    def release(self) -> None:
        """No-op: the server manages its memory."""

    def close(self) -> None:
        self._client.close()

    # -- one request ---------------------------------------------------------------------------------------------------

    def _ask(self, path: str, body: dict[str, object]) -> Completion:
        error = ""
        for attempt in range(self.config.max_retries + 1):
            if self._is_refused.is_set() or self._stopped.is_set():
                break
            reply, wait_s, error = self._attempt(path, body)
            if reply is not None:
                return _read(reply)
            if wait_s is None:
                break
            if attempt < self.config.max_retries:
                self._stopped.wait(max(wait_s, min(_MAX_WAIT_S, self.first_wait_s * 2**attempt)))
        return _failed(error or "the server refuses all of them")

    def _attempt(self, path: str, body: dict[str, object]) -> tuple[Any, float | None, str]:
        """The reply, or the shortest wait before the next attempt (None: do not retry), and the error."""
        import httpx

        try:
            response = self._client.post(f"{self.url}{path}", json=body)
            if response.status_code == 200:
                return response.json(), 0.0, ""
        except (httpx.HTTPError, ValueError) as error:
            return None, 0.0, _named(error)
        if response.status_code in _REFUSED:
            self._is_refused.set()
        if response.status_code not in _RETRIED:
            return None, None, _status_and_text(response)
        asked = response.headers.get("retry-after", "")
        wait_s = float(asked) if re.fullmatch(r"\d+(\.\d+)?", asked) else 0.0
        return None, min(wait_s, _MAX_WAIT_S), _status_and_text(response)

    def _request(self, task: Task, sample: int, sampling: Sampling, key: NoiseKey) -> tuple[str, dict[str, object]]:
        body: dict[str, object] = {
            "model": self.model,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sequence_key(key.seed, key.step, task.draw, sample) & 0x7FFF_FFFF,
        }
        if sampling.top_k:
            body["top_k"] = sampling.top_k  # not OpenAI's own, but vLLM's and ours
        if sampling.stop_strings:
            body["stop"] = list(sampling.stop_strings)
        if self.config.api == "chat":
            path, body["messages"] = "/chat/completions", [dict(message) for message in task.messages]
        else:
            path, body["prompt"] = "/completions", "\n\n".join(m["content"] for m in task.messages)
        return path, {**body, **self.config.extra_body}


def _in_threads(work: Callable[[_Item], _Result], items: Sequence[_Item], num_threads: int) -> list[_Result]:
    """`work` of every item, in their order; the first error ends it.

    As ThreadPoolExecutor.map, but Ctrl-C does not wait: these are daemon threads, while a request may run for as long
    as its time-out allows.
    """
    found: dict[int, _Result] = {}
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()  # what each thread ended with
    left = iter(enumerate(items))
    taking = threading.Lock()
    stopped = threading.Event()

    def take() -> None:
        try:
            while not stopped.is_set():
                with taking:
                    place, item = next(left)
                found[place] = work(item)
        except StopIteration:
            ended.put(None)
        except BaseException as error:
            ended.put(error)

    threads = [threading.Thread(target=take, daemon=True) for _ in range(min(num_threads, len(items)))]
    try:
        for thread in threads:
            thread.start()
        for _ in threads:
            if error := ended.get():
                raise error
    finally:
        stopped.set()
    return [found[place] for place in range(len(items))]


def _read(reply: Any) -> Completion:
    try:
        choice = reply["choices"][0]
        text = _text_of(choice["message"]["content"] if "message" in choice else choice["text"])
        reason = choice.get("finish_reason")
        given = (reply.get("usage") or {}).get("completion_tokens")
        num_tokens = given if isinstance(given, int) and given >= 0 else None
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return _failed(f"the reply has no answer in it: {redact(str(reply))[:200]}")
    if reason not in ("stop", "length"):
        return _failed(f"the server ended it with finish_reason {reason!r}")
    return ServedCompletion((), (), text, reason, num_tokens=num_tokens)


def _failed(reason: str) -> Completion:
    return Completion((), (), "", "stop", error=redact(f"request failed: {reason}"))


def _text_of(content: object) -> str:
    """Some servers send an answer in parts; only those of type text belong to it. TypeError for anything but text."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part["type"] == "text")
    if not isinstance(content, str | None):
        raise TypeError(f"{type(content).__name__} instead of text")
    return content or ""


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _status_and_text(response: httpx.Response) -> str:
    text = redact(" ".join(str(response.text).split()))[:200]
    return f"HTTP {response.status_code} {text}".strip()
