"""Builds an evaluation from its config: problems, engine, environment, and the folder of the results.

Errors in the config and the data are found before a model is loaded. A finished evaluation loads none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain import __version__
from posttrain.apps.evaluate.answers import AnswerReader, answer_reader
from posttrain.apps.evaluate.engines import native_precision, start_engines, vllm_precision
from posttrain.apps.evaluate.folder import EvaluationFolder
from posttrain.apps.evaluate.identity import digest, files_digest, judge_of, prompts_hash
from posttrain.apps.evaluate.problems import ProblemSet, load_problems
from posttrain.apps.evaluate.results import EvaluationSummary, ProblemResult, hash_of_tasks
from posttrain.apps.evaluate.runner import EvaluationRunner, TaskQueue, unfinished_batches
from posttrain.apps.evaluate.server import OpenAiServer
from posttrain.apps.evaluate.summary import Facts, summarise
from posttrain.config import EnvironmentConfig, EvalRunConfig, LoadedConfig
from posttrain.config.render import plain_values
from posttrain.data.chat import ChatFormat
from posttrain.data.errors import DataError
from posttrain.environments import build_environments, check_environments
from posttrain.errors import InputError
from posttrain.files.redaction import redact, without_credentials
from posttrain.models.accepted_names import (
    ModelReferenceError,
    ResolvedModel,
    model_fingerprint,
    resolve_registered_model,
)
from posttrain.models.hub import why_unavailable
from posttrain.orchestration.sharded import ShardedEngine
from posttrain.roles import Engine, Progress, ShowProgress
from posttrain.rollouts.fresh import FreshRollouts
from posttrain.rollouts.multi_turn import build_turns
from posttrain.types import Sampling, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_FOLDER = Path("results/eval")
ANSWERS = "answers"  # what the progress bar counts
# Samples in one batch by default: enough to keep the device busy, few enough to lose little when interrupted.
_SAMPLES_PER_STEP = {"cuda": 1024, "cpu": 32, "server": 256}


@dataclass
class EvaluationBuild:
    loaded: LoadedConfig[EvalRunConfig]
    say: Callable[[str], None]

    @property
    def config(self) -> EvalRunConfig:
        return self.loaded.config

    @cached_property
    def problem_set(self) -> ProblemSet:
        return load_problems(self.config.data, seed=self.config.eval.seed, limit=self.config.eval.max_problems)

    @cached_property
    def reference(self) -> ResolvedModel | None:
        """The model, unless it is on a server."""
        return (
            None if self.config.server_url is not None else resolve_registered_model(self.config.generation.model_name)
        )

    @cached_property
    def environment_config(self) -> EnvironmentConfig:
        """The environment that scores. Multiple choice gets its own verifier, unless the config names another."""
        config = self.config.env[self.config.judge]
        is_given = config.type or config.rewards or config.function or config.verifier_type or config.turns
        if self.problem_set.is_choice and not is_given:
            judge = self.problem_set.benchmark.judge
            return config.model_copy(update={"verifier_type": "english_multichoice" if judge == "math" else judge})
        return config

    def answer_reader(self) -> AnswerReader:
        rewards = list(self.environment_config.reward_configs(self.config.judge).values())
        kinds = [getattr(reward, "verifier_type", None) or reward.type for reward in rewards]
        if len(kinds) == 1 and kinds[0] == "multiple_choice":
            return answer_reader(f"{getattr(rewards[0], 'language', 'english')}_multichoice")
        known = [kind for kind in kinds if kind == "math" or kind.endswith("multichoice")]
        return answer_reader(known[0] if known else "text")

    # -- what is measured ----------------------------------------------------------------------------------------------

    @cached_property
    def device(self) -> str:
        if self.config.server_url is not None:
            return "server"
        if self.config.generation.backend == "vllm":
            return "cuda"
        if self.config.num_engines > 1 and self.config.generation.device == "cuda":
            return "cuda"  # of the nodes; this machine may have none
        from posttrain.models.loading import resolve_device

        return resolve_device(self.config.generation.device).type

    @cached_property
    def fingerprint(self) -> str | None:
        """Of the weights, where they are local; a hub name or a server is identified by its name."""
        return None if self.reference is None else model_fingerprint(self.reference, self.say)

    @cached_property
    def server(self) -> OpenAiServer | None:
        """The server, if the model is one. The name of its model is requested from it, unless the config has it."""
        url = self.config.server_url
        return None if url is None else OpenAiServer(url, self.config.generation.openai_cfg)

    def _check_model(self) -> None:
        """InputError if the model is not available, or the server does not answer."""
        _ = self.server
        if self.reference is not None and (reason := why_unavailable(self.reference.model)) is not None:
            raise ModelReferenceError(f"generation.model_name: {reason}")

    def check_problems_and_judge(self) -> None:
        """InputError if problems cannot be read, or their environment is incomplete. The model may still be missing."""
        check_environments({self.config.judge: self.environment_config}, Path.cwd())

    def identity(self) -> dict[str, object]:
        """Everything that determines answers and rewards: no credential, and nothing that only changes their speed."""
        config, generation = self.config, self.config.generation
        problems = self.problem_set.problems
        template = [config.tokenizer.chat_template, config.tokenizer.chat_template_kwargs]
        named = generation.model_name if self.fingerprint is None else None
        own_tokenizer = config.tokenizer.name if config.tokenizer.name != generation.model_name else None
        found = {
            "model": named if self.server is None else self.server.model,
            "model_fingerprint": self.fingerprint,
            "server": self.server and [self.server.url, generation.openai_cfg.api, generation.openai_cfg.extra_body],
            "engine": self._engine(),
            "dataset": self.problem_set.name,
            "problem_set_hash": hash_of_tasks(problems),
            "prompts_hash": prompts_hash(problems),
            "metadata_hash": digest([problem.metadata for problem in problems]),  # judges read it
            "tokenizer": own_tokenizer and [own_tokenizer, files_digest({"tokenizer": {"name": own_tokenizer}})],
            "chat_template": [*template, files_digest(config.tokenizer.chat_template)],
            "max_model_len": generation.vllm_cfg.max_model_len,
            "sampling": {
                key: getattr(generation, key)
                for key in ("max_new_tokens", "temperature", "top_p", "top_k", "stop_token_ids", "stop_strings")
            }
            | {"ignore_eos": generation.ignore_eos},
            "seed": config.eval.seed,
            "num_tests_per_prompt": config.eval.num_tests_per_prompt,
            "problems_per_step": self.problems_per_step,
            "judge": judge_of(self.environment_config.model_dump()),
            **({} if self.environment_config.turns is None else {"max_rollout_turns": config.eval.max_rollout_turns}),
        }
        plain: dict[str, object] = without_credentials(found)
        return plain

    def _engine(self) -> list[object]:
        generation, vllm = self.config.generation, self.config.generation.vllm_cfg
        if self.server is not None:
            return ["openai_url"]
        if generation.backend == "vllm":
            numbers = [vllm_precision(generation), vllm.kv_cache_dtype, vllm.load_format or "auto"]
            return ["vllm", *numbers, generation.vllm_kwargs, files_digest(generation.vllm_kwargs)]
        return ["native", self.device, native_precision(generation)]

    @property
    def problems_per_step(self) -> int:
        """Settings of one engine: the number of engines does not change the identity of an evaluation."""
        given = self.config.generation.num_prompts_per_step
        picked = max(1, _SAMPLES_PER_STEP[self.device] // self.config.eval.num_tests_per_prompt)
        return given if given > 0 else picked

    @property
    def _batch_size(self) -> int:
        given = self.config.generation.num_prompts_per_step
        return given if given > 0 else self.problems_per_step * self.config.num_engines

    def folder(self, identity: dict[str, object]) -> Path:
        if self.config.eval.save_path is not None:
            return Path(self.config.eval.save_path)
        model = re.sub(r"[^\w.-]+", "-", redact(self.config.generation.model_name).strip("/.")).strip("-")[-60:]
        dataset = re.sub(r"[^\w.-]+", "-", self.problem_set.name)
        return DEFAULT_FOLDER / dataset / f"{model}-{digest(identity)[:8]}"

    # -- running -------------------------------------------------------------------------------------------------------

    def execute(
        self, show_progress: ShowProgress, *, retry_unscored: bool = False
    ) -> tuple[EvaluationSummary, list[ProblemResult], Path]:
        """Answer the problems that are not finished, and summarise."""
        self._check_model()  # before data is fetched
        self.check_problems_and_judge()
        with ExitStack() as cleanup:
            if self.server is not None:
                cleanup.callback(self.server.close)
            identity = self.identity()
            path = self.folder(identity)
            folder = EvaluationFolder.open(path, identity, self.loaded.to_yaml())
            cleanup.callback(folder.close)
            if retry_unscored and (count := folder.forget_unscored()):
                self.say(f"{count} problems with unscored samples are tried again")
            problems, num_samples = self.problem_set.problems, self.config.eval.num_tests_per_prompt
            done = sum(problem.id in folder.finished for problem in problems)
            if done < len(problems):
                before = f", {done} of them finished before" if done else ""
                self.say(
                    f"{self.problem_set.name}: {len(problems)} problems{before}, {num_samples} samples each; {path}"
                )
                self._answer(folder, show_progress, (len(problems) - done) * num_samples, cleanup)
            else:
                self.say(f"{self.problem_set.name}: all {done} problems were finished before; {path}")
            finished = [folder.finished[problem.id] for problem in problems]
            summary = summarise(self.config, finished, self._facts(folder))
            folder.write_summary(summary)
            return summary, finished, path

    def _facts(self, folder: EvaluationFolder) -> Facts:
        return Facts(
            model=self.config.generation.model_name,
            dataset=self.config.data.dataset_name,
            config=plain_values(self.config),
            code_version=__version__,
            model_fingerprint=self.fingerprint,
            num_devices=self.config.num_devices,
            timings=folder.timings(),
        )

    # -- where answers come from ---------------------------------------------------------------------------------------

    def _answer(
        self, folder: EvaluationFolder, show_progress: ShowProgress, num_answers: int, cleanup: ExitStack
    ) -> None:
        """Sample, score and save the problems that are not finished."""
        engine, chat = self._engine_and_chat(cleanup)
        batches = unfinished_batches(self._tasks(chat), self._batch_size, folder.finished)
        environments = {self.config.judge: self.environment_config}
        source = FreshRollouts(
            TaskQueue(batches),
            engine,
            cleanup.enter_context(build_environments(environments, base_folder=Path.cwd())),
            num_samples=self.config.eval.num_tests_per_prompt,
            sampling=self._sampling(chat.stop_token_ids if chat is not None else ()),
            seed=self.config.eval.seed,
            label=ANSWERS,
            after_step=True,
        )
        if chat is not None:
            turns = build_turns(
                environments,
                chat,
                max_turns=self.config.eval.max_rollout_turns,
                max_total_tokens=self._max_total_tokens,
                warn=self.say,
                cleanup=cleanup,
            )
            source = source if turns is None else turns.over(source)
        runner = EvaluationRunner(self.problem_set, source, self.answer_reader(), folder)
        try:
            with show_progress(ANSWERS, num_answers) as progress:
                source.show_progress = partial(first_answers, progress)
                runner.run([len(batch) for batch in batches])
        except FloatingPointError as error:  # a model whose logits are NaN is bad input here, not a crash
            raise InputError(f"generation.model_name: the model cannot be evaluated: {error}") from error

    def _engine_and_chat(self, cleanup: ExitStack) -> tuple[Engine, ChatFormat | None]:
        """The engine and how prompts are written for it; a server writes them itself."""
        config = self.config
        if self.server is not None:
            return self.server, None
        from posttrain.models.loading import load_tokenizer

        assert self.reference is not None
        tokenizer = self._own_tokenizer() or load_tokenizer(self.reference.tokenizer, "generation.model_name")
        chat = ChatFormat(tokenizer, config.tokenizer.chat_template, config.tokenizer.chat_template_kwargs)
        workers = start_engines(config, self.reference)
        cleanup.callback(workers.close)
        if config.num_engines > 1:
            self.say(f"{config.num_engines} engines share the problems")
        return ShardedEngine(workers), chat

    def _own_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that the config names, if it is not the model's."""
        from posttrain.models.loading import load_tokenizer

        name = self.config.tokenizer.name
        return load_tokenizer(name, "tokenizer.name") if name != self.config.generation.model_name else None

    @property
    def _max_total_tokens(self) -> int:
        return self.config.generation.vllm_cfg.max_model_len or 1 << 30

    def _tasks(self, chat: ChatFormat | None) -> list[Task]:
        """The problems in the model's format. A problem that does not fit is an error: skipping it would change the
        benchmark.
        """
        judge, problems = self.config.judge, self.problem_set.problems
        if chat is None:
            return [replace(task, prompt=task.messages[-1]["content"], environment=judge) for task in problems]
        total = self._max_total_tokens
        limit = min(self.config.data.max_input_seq_length or total, total - 1)
        texts = [chat.render(task.messages) for task in problems]
        tasks = []
        for task, where, text, ids in zip(
            problems, self.problem_set.where, texts, chat.encode_prompts(texts), strict=True
        ):
            if not 0 < len(ids) <= limit:
                raise DataError(
                    f"{where}: the prompt has {len(ids)} tokens, and between 1 and {limit} are possible; raise "
                    "generation.vllm_cfg.max_model_len or data.max_input_seq_length"
                )
            tasks.append(replace(task, prompt=text, prompt_ids=tuple(ids), environment=judge))
        return tasks

    def _sampling(self, end_of_turn_ids: Sequence[int]) -> Sampling:
        generation = self.config.generation
        return Sampling(
            max_new_tokens=generation.max_new_tokens,
            temperature=generation.temperature,
            top_p=generation.top_p,
            top_k=max(generation.top_k or 0, 0),
            stop_token_ids=tuple(generation.stop_token_ids or ()),
            end_of_turn_ids=tuple(end_of_turn_ids),
            stop_strings=tuple(generation.stop_strings or ()),
            ignore_eos=generation.ignore_eos,
        )


@contextmanager
def first_answers(progress: Progress, label: str, total: int) -> Iterator[Progress]:
    """One bar for the whole evaluation: it counts answers that were begun, not later turns and not scores."""
    yield progress if label == ANSWERS else lambda _: None
