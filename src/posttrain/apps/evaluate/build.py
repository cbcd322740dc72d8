"""Builds an evaluation from its config: problems, environment, and the folder of the results. The model is in
`model.py`.

Errors in the config and the data are found before a model is loaded. A finished evaluation loads none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from posttrain.apps.evaluate.answers import AnswerReader, answer_reader
from posttrain.apps.evaluate.folder import EvaluationFolder
from posttrain.apps.evaluate.identity import digest, judge_of, prompts_hash
from posttrain.apps.evaluate.model import EvaluatedModel
from posttrain.apps.evaluate.problems import ProblemSet, load_problems
from posttrain.apps.evaluate.results import SUMMARY_FILE, EvaluationSummary, ProblemResult, hash_of_tasks, summary_text
from posttrain.apps.evaluate.runner import EvaluationRunner, TaskQueue, unfinished_batches
from posttrain.apps.evaluate.summary import summarise
from posttrain.config import EnvironmentConfig, EvalRunConfig, LoadedConfig
from posttrain.data.chat import ChatFormat, attached
from posttrain.data.errors import DataError
from posttrain.environments import build_environments, check_environments
from posttrain.errors import InputError
from posttrain.files.durable import write_text
from posttrain.files.redaction import redact, without_credentials
from posttrain.roles import Progress, ShowProgress
from posttrain.rollouts.agents import build_conversations
from posttrain.rollouts.fresh import FreshRollouts
from posttrain.types import Sampling, Task

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
    def model(self) -> EvaluatedModel:
        return EvaluatedModel(self.config, self.say)

    @cached_property
    def problem_set(self) -> ProblemSet:
        return load_problems(self.config.data, seed=self.config.eval.seed, limit=self.config.eval.max_problems)

    @cached_property
    def environment_config(self) -> EnvironmentConfig:
        """The environment that scores. Multiple choice gets its own verifier, unless the config names another."""
        config = self.config.env[self.config.judge]
        is_given = config.type or config.rewards or config.function or config.verifier_type or config.takes_turns
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

    def check_problems_and_judge(self) -> None:
        """InputError if problems cannot be read, or their environment is incomplete. The model may still be missing."""
        check_environments({self.config.judge: self.environment_config}, Path.cwd())

    def identity(self) -> dict[str, object]:
        """Everything that determines answers and rewards: no credential, and nothing that only changes their speed."""
        config, generation = self.config, self.config.generation
        problems, model = self.problem_set.problems, self.model.identity()
        found = {
            **{key: model.pop(key) for key in ("model", "model_fingerprint", "server", "engine")},
            "dataset": self.problem_set.name,
            "problem_set_hash": hash_of_tasks(problems),
            "prompts_hash": prompts_hash(problems),
            "metadata_hash": digest([problem.metadata for problem in problems]),  # judges read it
            **model,
            "sampling": {
                key: getattr(generation, key)
                for key in ("max_new_tokens", "temperature", "top_p", "top_k", "stop_token_ids", "stop_strings")
            }
            | {"ignore_eos": generation.ignore_eos},
            "seed": config.eval.seed,
            "num_tests_per_prompt": config.eval.num_tests_per_prompt,
            "problems_per_step": self.problems_per_step,
            "judge": judge_of(self.environment_config.model_dump()),
            **({"max_rollout_turns": config.eval.max_rollout_turns} if self.environment_config.takes_turns else {}),
        }
        plain: dict[str, object] = without_credentials(found)
        return plain

    @property
    def problems_per_step(self) -> int:
        """Settings of one engine: the number of engines does not change the identity of an evaluation."""
        given = self.config.generation.num_prompts_per_step
        picked = max(1, _SAMPLES_PER_STEP[self.model.device] // self.config.eval.num_tests_per_prompt)
        return given if given > 0 else picked

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
        self.model.check()  # before data is fetched
        self.check_problems_and_judge()
        with ExitStack() as cleanup:
            if self.model.server is not None:
                cleanup.callback(self.model.server.close)
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
            summary = summarise(self.config, finished, self.model.fingerprint, folder.timings())
            write_text(path / SUMMARY_FILE, summary_text(summary))
            return summary, finished, path

    # -- where answers come from ---------------------------------------------------------------------------------------

    def _answer(
        self, folder: EvaluationFolder, show_progress: ShowProgress, num_answers: int, cleanup: ExitStack
    ) -> None:
        """Sample, score and save the problems that are not finished."""
        engine, chat = self.model.start(cleanup)
        given = self.config.generation.num_prompts_per_step
        batch_size = given if given > 0 else self.problems_per_step * self.config.num_engines
        batches = unfinished_batches(self._tasks(chat), batch_size, folder.finished)
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
            source = build_conversations(
                environments,
                chat,
                model=self.config.generation.model_name,
                max_turns=self.config.eval.max_rollout_turns,
                max_total_tokens=self._max_total_tokens,
                warn=self.say,
                cleanup=cleanup,
            )(source)
        runner = EvaluationRunner(self.problem_set, source, self.answer_reader(), folder)
        try:
            with show_progress(ANSWERS, num_answers) as progress:
                source.show_progress = partial(first_answers, progress)
                runner.run([len(batch) for batch in batches])
        except FloatingPointError as error:  # a model whose logits are NaN is bad input here, not a crash
            raise InputError(f"generation.model_name: the model cannot be evaluated: {error}") from error

    @property
    def _max_total_tokens(self) -> int:
        return self.config.generation.vllm_cfg.max_model_len or 1 << 30

    def _tasks(self, chat: ChatFormat | None) -> list[Task]:
        """The problems in the model's format. A problem that does not fit is an error: skipping it would change the
        benchmark.
        """
        judge, problems = self.config.judge, self.problem_set.problems
        if chat is None:
            if any(task.images for task in problems):
                raise DataError("a problem has images, which are not sent to a server; evaluate the model itself")
            return [replace(task, prompt=task.messages[-1]["content"], environment=judge) for task in problems]
        total = self._max_total_tokens
        limit = min(self.config.data.max_input_seq_length or total, total - 1)
        texts = chat.render_all([attached(task.messages, task.images) for task in problems])
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
