"""Builds multi-turn rollouts from the config of their environments, for training, validation and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from posttrain.config import EnvironmentConfig
from posttrain.data.chat import ChatFormat
from posttrain.environments.settings import read_settings, read_turns
from posttrain.environments.turns.pool import TurnRouter
from posttrain.rollouts.fresh import FreshRollouts
from posttrain.rollouts.multi_turn import MultiTurnRollouts
from posttrain.rollouts.next_turn import NextTurn
from posttrain.rollouts.tool_prompts import ToolPrompts


@dataclass(frozen=True)
class TurnTaking:
    """Converts a single-turn source into a multi-turn one."""

    router: TurnRouter
    renderer: NextTurn
    chat: ChatFormat
    judged: frozenset[str]
    max_turns: int
    max_total_tokens: int

    def over(self, fresh: FreshRollouts) -> MultiTurnRollouts:
        return MultiTurnRollouts(
            ToolPrompts(fresh.stream, self.chat, self.router.names, self.router.tools),
            fresh.engine,
            fresh.environment,
            fresh.num_samples,
            fresh.sampling,
            fresh.seed,
            fresh.show_progress,
            fresh.label,
            fresh.after_step,
            turns=self.router,
            renderer=self.renderer,
            max_turns=self.max_turns,
            max_total_tokens=self.max_total_tokens,
            judged=self.judged,
        )


def build_turns(
    environments: Mapping[str, EnvironmentConfig],
    chat: ChatFormat,
    *,
    max_turns: int,
    max_total_tokens: int,
    warn: Callable[[str], None],
    cleanup: ExitStack,
    when_stopped: Callable[[Callable[[], None]], None] = lambda listener: None,
) -> TurnTaking | None:
    """None if no environment in use is multi-turn."""
    settings = read_turns(environments, base_folder=Path.cwd())
    if not settings:
        return None
    renderer = NextTurn(chat)
    if renderer.caution is not None:
        warn(renderer.caution)
    router = TurnRouter(settings)
    cleanup.callback(router.close)
    when_stopped(router.interrupt)
    return TurnTaking(
        router,
        renderer,
        chat,
        judged=frozenset(read_settings(environments, Path.cwd())),
        max_turns=max_turns,
        max_total_tokens=max_total_tokens,
    )
