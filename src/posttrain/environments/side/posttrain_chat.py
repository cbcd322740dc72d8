"""A harness for verifiers that asks the model once, in this process: for tasksets of one turn. Other harnesses start
programs, which they install first.
"""

from __future__ import annotations

from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.runtimes import ProgramResult


class ChatHarness(vf.Harness[HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any, **more: Any
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
        said = [message if isinstance(message, dict) else message.model_dump(exclude_none=True) for message in asked]
        messages = [*([{"role": "system", "content": system}] if system else []), *said]
        async with httpx.AsyncClient(timeout=None) as client:
            answer = await client.post(
                f"{endpoint.rstrip('/')}/chat/completions",
                json={"model": ctx.model, "messages": messages},
                headers={"Authorization": f"Bearer {secret}"},
            )
        return ProgramResult(int(answer.is_error), "", answer.text if answer.is_error else "")


__all__ = ["ChatHarness"]
