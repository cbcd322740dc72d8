"""Builds a run from its config: data, workers, recorder, checkpoints, algorithm, loop.

All input is checked before the model is loaded: the data, the reward functions, the model's folder.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from posttrain.checkpointing import CheckpointStore, Interruption, SaveDeadline
from posttrain.checkpointing.run_folder import WriteAccess, inspect_folder, run_folder
from posttrain.checkpointing.save_and_resume import CheckpointSaver, CopyRule, Exporter, SaverSettings
from posttrain.config import LoadedConfig, PolicyConfig, RunConfig
from posttrain.config.changes import changes_since
from posttrain.config.placement import ENGINE, REFERENCE
from posttrain.config.policy import automatic_schedule, is_automatic
from posttrain.data.chat import ChatFormat
from posttrain.data.errors import DataError
from posttrain.data.packing import MicroBatching
from posttrain.engines.weights import Handover
from posttrain.errors import InputError, Superseded, exit_code_of, storage_error
from posttrain.files.digests import digest
from posttrain.loop import LoopSettings, TrainingLoop
from posttrain.models.loading import DTYPES, check_model_exists, expand_images_for, load_tokenizer
from posttrain.orchestration.rank import Rank, build_rank
from posttrain.orchestration.sampler_check import CheckedEngine
from posttrain.orchestration.sharded import PushedWeights, ShardedEngine, ShardedTrainer, SharedWeights, WeightsOfRanks
from posttrain.orchestration.workers import RankLayout, WorkerGroup, call_all, start_workers
from posttrain.policy.hardware import peak_flops
from posttrain.policy.parallel.mesh import Mesh
from posttrain.policy.trainer import ModelFacts, RankSetup
from posttrain.recipes import recipe_for
from posttrain.recipes.recipe import RunParts, header_lines
from posttrain.reporting.loggers import Loggers
from posttrain.reporting.machines import GpuMonitor
from posttrain.reporting.presentation import Presentation, RecorderSettings
from posttrain.reporting.recorder import RunRecorder
from posttrain.reporting.rows import Hardware
from posttrain.reporting.run_files import append_log
from posttrain.reporting.token_files import token_pieces
from posttrain.reporting.wording import short_model_name
from posttrain.roles import RoundEngine, WeightSync

# Short description of a run's memory and time, given device name and number of steps; empty if unknown.
Planner = Callable[[RunConfig, str, int], str]
# Makes an export from a function that takes warnings, and whether adapters are merged into the model.
ExportMaker = Callable[[Callable[[str], None], bool], Exporter]


class TrainingRun:
    """A training run, ready to start. Close it to stop worker processes."""

    def __init__(
        self,
        loaded: LoadedConfig,
        *,
        quiet: bool = False,
        title: str = "",
        make_export: ExportMaker | None = None,
        access: WriteAccess | None = None,
        verbose: bool = False,
        plan: Planner | None = None,
    ) -> None:
        self.loaded = loaded
        self.config: RunConfig = loaded.config
        self.quiet = quiet
        self.title = title
        self.verbose = verbose
        self._plan = plan
        self._make_export = make_export
        self._access = access or WriteAccess.take(loaded.config)
        self._cleanup = ExitStack()
        self._recording: RunRecorder | None = None
        with self._ending():
            self.loop = self._build()

    def execute(self) -> int:
        with self._ending():
            code = self.loop.run()
        with Interruption(answer="the run is over, and is ending"):
            self.close(code)
        return code

    def close(self, exit_code: int | None = None) -> None:
        """Stop worker processes and release the folder. `exit_code` None: the run has crashed."""
        self._cleanup.close()
        self._access.end(exit_code)

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """On an error: write the reason to the folder, stop the workers, release the folder."""
        try:
            yield
        except BaseException as error:
            # After the start, a file that cannot be written is not a config error.
            fault = storage_error(error) if self._access.has_begun else None
            try:
                self._write_reason(fault or error)
                self._cleanup.close()
            finally:
                self._access.end_with(fault or error)
            if fault is not None and fault is not error:
                raise fault from error
            raise

    def _write_reason(self, error: BaseException) -> None:
        text = "".join(traceback.format_exception(error))
        if self._recording is not None and self._access.has_begun:
            self._recording.record_crash(error, text)
        elif exit_code_of(error) is None:
            with suppress(OSError, Superseded):
                self._access.record.confirm()
                append_log(self._access.record.folder, [self._access.record.heading, text])

    def _build(self) -> TrainingLoop:
        config, schedule = self.config, self.config.schedule
        if config.checkpointing.save_consolidated is True and self._make_export is None:
            raise InputError(
                "checkpointing.save_consolidated = true: this program cannot export models; set it to false"
            )
        recipe = recipe_for(self.config.kind, config)
        recipe.check()
        check_model_exists(config.policy.model_name)
        tokenizer = load_tokenizer(config.policy.tokenizer.name)
        chat = recipe.chat_form(
            tokenizer, config.policy.tokenizer.chat_template, config.policy.tokenizer.chat_template_kwargs or {}
        )
        chat.image_tokens = expand_images_for(config.policy.model_name, tokenizer)
        prepared = recipe.prepare(chat)
        train = prepared.train
        per_step = config.step_sizes().num_rows
        max_steps = min(schedule.max_num_steps, schedule.max_num_epochs * len(train) // per_step)
        if max_steps < 1:
            left_out = "".join(f"; {count} left out: {reason}" for reason, count in train.dropped.items())
            raise DataError(
                f"data.train has {len(train)} usable {prepared.unit}, fewer than the {per_step} of one step{left_out}; "
                "give more data, a smaller step, or more epochs (max_num_epochs)"
            )
        self._settle_schedule(max_steps)
        config = self.config
        workers = self._workers(chat, recipe.beside())
        self._cleanup.callback(workers.close)
        facts = call_all(workers, Rank.facts)[0]
        header = header_lines(
            config,
            prepared,
            facts,
            num_devices=config.cluster.num_workers,
            max_steps=max_steps,
            planned=self._plan(config, facts.device_name, max_steps) if self._plan is not None else "",
            unused_epochs=self.loaded.unused_epochs,
        )
        decode = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        recorder = self._recording = self._recorder(recipe.shown(), workers, facts, max_steps, header, decode)
        for name, rows in (("data.train", train), ("data.validation", prepared.validation)):
            for reason, count in (rows.dropped if rows is not None else {}).items():
                recorder.warn(f"{name}: {count} rows left out: {reason}")
            for reason, count in (rows.noted if rows is not None else {}).items():
                recorder.warn(f"{name}: {count} rows: {reason}")
        interruption = Interruption()
        interruption.tell(workers.engines.request_stop)
        trainer = recipe.trainer_type()(
            workers,
            train=self._micro_batching("train", train.pack_size),
            score=self._micro_batching("logprob", train.pack_size),
            seed=schedule.seed,
            show_progress=recorder.progress,
            stop=interruption,
        )
        engine, weights = self._sampling(workers, trainer, recorder.warn)
        algorithm = prepared.algorithm(
            RunParts(
                policy=trainer,
                engine=engine,
                weights=weights,
                show_progress=recorder.progress,
                announce=recorder.stage,
                warn=recorder.warn,
                max_steps=max_steps,
                cleanup=self._cleanup,
                when_stopped=interruption.tell,
                beside=workers.beside,
            )
        )
        return TrainingLoop(
            settings=self._loop_settings(max_steps, has_validation=prepared.validation is not None),
            algorithm=algorithm,
            recorder=recorder,
            saver=CheckpointSaver(
                self._saver_settings(per_step, len(train) / per_step, on_gpu=facts.device == "cuda"),
                trainer,
                prepared.position,
                recorder,
                self._store(recorder),
                self.loaded.to_yaml(),
                self._export(recorder),
                CopyRule(
                    by_cost=config.checkpointing.save_consolidated == "auto",
                    model_bytes=facts.num_parameters * DTYPES[config.policy.precision].itemsize,
                ),
            ),
            deadline=SaveDeadline(config.checkpointing.must_save_by_s),
            interruption=interruption,
        )

    def _settle_schedule(self, max_steps: int) -> None:
        """Replace `policy.scheduler: auto` by the schedule that it is; a resumed run keeps the one it began with."""
        config, settings = self.config, self.config.checkpointing
        if config.policy.scheduler != "auto":
            return
        before = inspect_folder(config.logger.log_dir, settings.checkpoint_dir) if settings.enabled else None
        kept = before.scheduler if before is not None and before.step else None
        schedule = kept if is_automatic(kept) else automatic_schedule(max_steps)
        policy = config.policy.model_copy(update={"scheduler": schedule})
        self.config = config.model_copy(update={"policy": policy})
        self.loaded = replace(self.loaded, config=self.config)

    def _workers(self, chat: ChatFormat, beside: Mapping[str, Callable[[], object]]) -> WorkerGroup:
        config, placement = self.config, self.config.placement
        setup = _rank_setup(config, chat)
        layout = RankLayout(
            config.cluster.num_nodes,
            config.cluster.gpus_per_node,
            device=config.policy.device,
            num_threads=config.policy.num_threads,
            mesh=Mesh.over(config.num_ranks, config.policy.dtensor_cfg),
            placement=placement,
            log_folder=run_folder(config.logger.log_dir, config.checkpointing.checkpoint_dir).absolute(),
        )
        setup = replace(setup, tells_whole_groups=any(group.name != ENGINE for group in placement.groups))
        shares = 1 if config.vllm_spans_gpus else config.gpus_per_engine
        beside = {
            **beside,
            ENGINE: partial(build_rank, setup.for_sampling(shares, in_host_memory=config.vllm_spans_gpus)),
            REFERENCE: partial(build_rank, setup.for_reference()),
        }
        if placement.group(ENGINE) is not None:
            setup = setup.without_vllm()
        if placement.group(REFERENCE) is not None:
            setup = replace(setup, needs_reference=False)
        return start_workers(
            partial(build_rank, setup), layout, config.cluster.launcher, beside=beside, quiet=self.quiet
        )

    def _sampling(
        self, workers: WorkerGroup, trainer: ShardedTrainer, say: Callable[[str], None]
    ) -> tuple[RoundEngine, WeightSync]:
        """The engine, and how it gets the weights."""
        weights: WeightSync
        generation = self.config.policy.generation
        is_vllm = generation is not None and generation.uses_vllm
        if workers.engines is workers:
            # The vLLM of every rank has full layers, even if the ranks share theirs.
            engine = ShardedEngine(workers, mesh=Mesh(dp=workers.mesh.size) if is_vllm else None)
            weights = WeightsOfRanks(workers) if is_vllm else SharedWeights()
        else:
            folder = Path(self.config.checkpointing.checkpoint_dir).absolute()
            name, over_gpu_memory = digest(str(folder))[:16], not self.config.vllm_spans_gpus
            handover = Handover(name, folder, workers.num_nodes == 1, over_gpu_memory)
            weights = pushed = PushedWeights(workers, handover, say)
            self._cleanup.callback(pushed.close)
            engine = ShardedEngine(workers.engines, pushed.ensure_published)
        if generation is None or not is_vllm:
            return engine, weights
        section = generation.vllm_cfg
        limits = section.check_period, section.max_prob_error
        return CheckedEngine(engine, trainer, *limits, generation.temperature), weights

    def _micro_batching(self, which: Literal["train", "logprob"], pack_size: int) -> MicroBatching:
        """`pack_size` is the size of precomputed packs, which are not split; 0: no packs."""
        policy = self.config.policy
        size = policy.train_micro_batch_size if which == "train" else policy.logprob_batch_size
        budget = None
        for section in (policy.sequence_packing, policy.dynamic_batching):
            if section.enabled:
                budget = section.train_mb_tokens if which == "train" else section.logprob_mb_tokens
        if pack_size:
            budget = max(budget or 0, pack_size)
        return MicroBatching(
            max_tokens=budget,
            num_responses=size * self.config.step_sizes().num_answers_per_unit,
            algorithm=policy.sequence_packing.algorithm,
            seed=self.config.schedule.seed,
        )

    def _recorder(
        self,
        presentation: Presentation,
        workers: WorkerGroup,
        facts: ModelFacts,
        max_steps: int,
        header: list[str],
        decode: Callable[[Sequence[int]], str],
    ) -> RunRecorder:
        config, generation = self.config, self.config.policy.generation
        on_gpu = facts.device == "cuda"
        refit = "" if config.num_engines else "the sampler shares the trainer's weights"
        if generation is not None and generation.uses_vllm:
            refit = "the trainer's weights go to vLLM"
        return RunRecorder(
            run_folder(config.logger.log_dir, config.checkpointing.checkpoint_dir),
            RecorderSettings(
                presentation=presentation,
                max_steps=max_steps,
                hardware=Hardware(
                    config.cluster.num_workers,
                    peak_flops(facts.device_name) if on_gpu else None,
                    facts.flops_per_token,
                ),
                config_yaml=self.loaded.to_yaml(),
                changes_since=partial(changes_since, loaded=self.loaded),
                quiet=self.quiet,
                verbose=self.verbose,
                header=header,
                title=self.title or f"{self.config.kind.upper()} of {short_model_name(config.policy.model_name)}",
                num_val_samples_to_print=config.logger.num_val_samples_to_print,
                device_word="GPU" if on_gpu else "device",
                refit_remark=refit,
                settings=self.loaded.flat(),
                stop_on_error=config.doctor.on_error == "stop",
            ),
            loggers=Loggers(config.logger),
            gpus=GpuMonitor(config.logger.gpu_monitoring.collection_interval) if config.logger.monitor_gpus else None,
            attempt=self._access.record,
            pieces=token_pieces(decode),
            ask_ranks=workers.status,
        )

    def _store(self, recorder: RunRecorder) -> CheckpointStore:
        settings = self.config.checkpointing
        return CheckpointStore(
            Path(settings.checkpoint_dir),
            keep_top_k=settings.keep_top_k,
            metric_name=settings.metric_name,
            higher_is_better=settings.higher_is_better,
            save_period=settings.save_period,
            say=recorder.say,
            attempt=self._access.checkpoints,
        )

    def _export(self, recorder: RunRecorder) -> Exporter | None:
        if self._make_export is None or not self.config.checkpointing.save_consolidated:
            return None
        # The scoring layer of a reward model is trained with its adapters, so the copy keeps both.
        return self._make_export(recorder.warn, not self.config.scores_answers)

    def _loop_settings(self, max_steps: int, *, has_validation: bool) -> LoopSettings:
        section = self.config.schedule
        return LoopSettings(
            max_steps=max_steps,
            val_period=section.val_period if has_validation else 0,
            val_start_at=getattr(section, "val_start_at", -1),
            val_at_start=section.val_at_start and has_validation,
            val_at_end=section.val_at_end and has_validation,
            stop_metric=getattr(section, "stop_at_validation_metric", None),
            stop_threshold=getattr(section, "stop_at_validation_threshold", None),
        )

    def _saver_settings(self, per_step: int, steps_per_epoch: float, *, on_gpu: bool) -> SaverSettings:
        checkpointing = self.config.checkpointing
        return SaverSettings(
            enabled=checkpointing.enabled,
            period=checkpointing.save_period,
            optimizer=checkpointing.save_optimizer,
            samples_per_step=per_step,
            steps_per_epoch=steps_per_epoch,
            metric_name=checkpointing.metric_name,
            in_background=on_gpu if checkpointing.async_save == "auto" else checkpointing.async_save,
        )


def start_samplers(config: RunConfig, chat: ChatFormat) -> WorkerGroup:
    """Independent engines with the run's initial weights: on each device of its cluster, or on the GPUs of one vLLM."""
    size = config.gpus_per_engine if config.vllm_spans_gpus else 1
    layout = RankLayout(
        config.cluster.num_nodes,
        config.cluster.gpus_per_node // size,
        gpus_per_rank=size,
        device=config.policy.device,
        num_threads=config.policy.num_threads,
        is_process_group=False,
    )
    setup = _rank_setup(config, chat).for_sampling(1, in_host_memory=config.vllm_spans_gpus)
    return start_workers(partial(build_rank, setup), layout, config.cluster.launcher, quiet=True)


def _rank_setup(config: RunConfig, chat: ChatFormat) -> RankSetup:
    return RankSetup(
        _with_absolute_folders(config.policy),
        config.schedule.seed,
        config.needs_reference,
        chat.recorded_template,
        reward_model=config.scores_answers,
        answer_ends=chat.last_token_ids,
        teacher=None if config.teacher_name is None else _absolute(config.teacher_name),
        critic=None if config.critic is None else _with_absolute_folders(config.critic),
    )


def _with_absolute_folders(policy: PolicyConfig) -> PolicyConfig:
    """Absolute paths: ranks may run in another working directory."""
    tokenizer = policy.tokenizer.model_copy(update={"name": _absolute(policy.tokenizer.name)})
    changes: dict[str, object] = {"model_name": _absolute(policy.model_name), "tokenizer": tokenizer}
    if policy.generation is not None and policy.generation.vllm_cfg.python is not None:
        python = str(Path(policy.generation.vllm_cfg.python).absolute())
        section = policy.generation.vllm_cfg.model_copy(update={"python": python})
        changes["generation"] = policy.generation.model_copy(update={"vllm_cfg": section})
    return policy.model_copy(update=changes)


def _absolute(name: str) -> str:
    return str(Path(name).absolute()) if Path(name).is_dir() else name
