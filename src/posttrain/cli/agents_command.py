"""`posttrain agents`: one rollout of an agent and its repetition, without training; the tasks of an environment."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.cli.overrides_parser import OverridesParser, add_command
from posttrain.config import GrpoRunConfig, load_config
from posttrain.config.command_line import short_names
from posttrain.errors import ExitCode, InputError
from posttrain.models.accepted_names import from_checkpoints
from posttrain.reporting.console import Console
from posttrain.run import fitted, quieten_libraries

if TYPE_CHECKING:
    from posttrain.types import Rollout

KIND: str = "grpo"
EXIT_NOT_REPEATED = 2


def add_arguments(parser: OverridesParser) -> None:
    commands = parser.commands()
    check = add_command(commands, "check", "run one rollout of an agent and its repetition, without training")
    check.short_names = short_names(KIND)
    check.config_file("YAML file of the GRPO run")
    check.option("--task N", "which row of the training data (default: 0)", type=int, default=0)
    check.words()
    check.set_defaults(run=_check, interrupted="stopped")
    tasks = add_command(commands, "tasks", "write the tasks of an environment as rows of data")
    tasks.short_names = short_names(KIND)
    tasks.config_file("YAML file of the GRPO run")
    tasks.option("--env NAME", "which environment under env:", required=True)
    tasks.option("--out FILE", "jsonl file to write", required=True)
    tasks.option("--split NAME", "split of the tasks, of OpenEnv only (default: train)")
    tasks.option("--count N", "most tasks; of an environment without tasks, seeds (default: all, or 100)", type=int)
    tasks.words()
    tasks.set_defaults(run=_tasks, interrupted="stopped")


def _check(args: argparse.Namespace) -> int:
    loaded = from_checkpoints(fitted(lambda extra: load_config(KIND, args.config, [*args.words, *extra])))([])
    config = loaded.config
    assert isinstance(config, GrpoRunConfig)
    quieten_libraries()
    from posttrain.build import start_samplers
    from posttrain.data.entries import read_entries
    from posttrain.models.loading import check_model_exists, load_tokenizer
    from posttrain.orchestration.sharded import ShardedEngine
    from posttrain.recipes.grpo import GrpoRecipe, sampling_of
    from posttrain.rollouts.fresh import FixedTasks, FreshRollouts

    recipe, tokenizer = GrpoRecipe(config), config.policy.tokenizer
    recipe.check()
    check_model_exists(config.policy.model_name)
    template, kwargs = tokenizer.chat_template, tokenizer.chat_template_kwargs or {}
    chat = recipe.chat_form(load_tokenizer(tokenizer.name), template, kwargs)
    tasks = recipe.load_tasks(read_entries(config.data.train, config.data.default), chat)
    if not 0 <= args.task < len(tasks):
        raise InputError(f"--task {args.task}: data.train has rows 0 to {len(tasks) - 1}")
    task, console = tasks[args.task], Console(sys.stderr, quiet=False)
    if config.env[task.environment].agent is None:
        raise InputError(f"env.{task.environment} has no agent: set env.{task.environment}.agent")
    with ExitStack() as cleanup:
        workers = start_samplers(config, chat)
        cleanup.callback(workers.close)
        environment, turns = recipe.scoring(chat, console.note, cleanup, lambda listener: None)
        sampling = sampling_of(config.policy, chat.stop_token_ids)
        fresh = FreshRollouts(FixedTasks([task]), ShardedEngine(workers), environment, 1, sampling, config.grpo.seed)
        source = turns(fresh)
        first, second = (source.take(1, 1).groups[0].rollouts[0] for _ in range(2))
    print("\n".join(_lines(first)))
    if not first.score.scored:
        return ExitCode.NO_PROGRESS
    same = first.completion == second.completion and first.score == second.score
    print("the second rollout is the same" if same else "the second rollout differs:\n" + "\n".join(_lines(second)))
    return 0 if same else EXIT_NOT_REPEATED


def _tasks(args: argparse.Namespace) -> int:
    config = load_config(KIND, args.config, args.words).config
    assert isinstance(config, GrpoRunConfig)
    if args.env not in config.env:
        raise InputError(f"--env {args.env}: under env: there is {', '.join(config.env) or 'nothing'}")
    from posttrain.environments.agents.verifiers import Verifiers
    from posttrain.environments.item import BadSetup, Unscored
    from posttrain.environments.turns.openenv import OpenEnv
    from posttrain.files import durable

    block = config.env[args.env]
    if args.count is not None and args.count < 1:
        raise InputError(f"--count {args.count}: at least 1 is needed")
    if block.agent == "verifiers" and args.split is not None:
        setting = f"env.{args.env}.agent_kwargs.taskset_config"
        raise InputError(f"--split {args.split}: a taskset of verifiers has its split, if any, in {setting}")
    if block.turns != "openenv" and block.agent != "verifiers":
        known = "`turns: openenv` or `agent: verifiers`"
        raise InputError(f"--env {args.env}: only environments with {known} have tasks of their own")
    try:
        environment: OpenEnv | Verifiers
        own = {"python": block.python, "env": block.env}
        if block.turns == "openenv":
            environment = OpenEnv(**{**block.turns_kwargs, **own})
        else:
            environment = Verifiers(**{**block.agent_kwargs, **own})
        try:
            rows = environment.tasks(args.split or "train", args.count)
        finally:
            environment.side.end()
    except (TypeError, ValueError, BadSetup, Unscored) as error:
        raise InputError(f"env.{args.env} cannot list its tasks: {error}") from error
    durable.write_for_user(Path(args.out), "".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} tasks: {args.out}")
    return 0


def _lines(rollout: Rollout) -> list[str]:
    completion, score, talk = rollout.completion, rollout.score, rollout.completion.conversation
    assert talk is not None
    said = [(turn.role, turn.num_tokens, " ".join(turn.text.split())[:70]) for turn in talk.utterances]
    lines = [f"  {role:<10}{count:>6} tokens  {text}" for role, count, text in said]
    for number, row in enumerate(completion.rows if said else (), start=1):
        sizes = f"prompt of {len(row.prompt_ids)} tokens, then {len(row.token_ids)}, {sum(row.trained)} of them trained"
        lines.append(f"branch {number}: {sizes}")
    lines.append(", ".join(f"{name} {value:g}" for name, value in talk.counts.items() if value))
    parts = "".join(f", {name} {value:g}" for name, value in score.parts.items())
    return [*lines, f"unscored: {score.error}" if score.reward is None else f"reward {score.reward:g}{parts}"]
