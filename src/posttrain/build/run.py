"""A run from its config: data, workers, recorder, checkpoints, algorithm, loop.

Everything that can be wrong with the input is looked at before the model is loaded: the data, the reward functions, the
model's folder.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

from posttrain.algorithms.sft import Sft
from posttrain.build.credit import with_surplus
from posttrain.build.datasets import RunConfig, first_rows, load_datasets, samples_per_step
from posttrain.build.grpo import build_grpo, environments_in_use, uses_record
from posttrain.build.preference import build_preference, is_paired, needs_reference
from posttrain.build.rm import build_rm
from posttrain.checkpointing import CheckpointStore, SaveDeadline
from posttrain.checkpointing.saver import CheckpointSaver, SaverSettings
from posttrain.config import DpoRunConfig, GrpoRunConfig, LoadedConfig, PolicyConfig, RmRunConfig
from posttrain.data.chat import ChatFormat
from posttrain.data.errors import DataError
from posttrain.data.packing import MicroBatching, PackingAlgorithm
from posttrain.data.sampler import Stream
from posttrain.data.whole_chat import WholeChatFormat
from posttrain.environments import check_environments
from posttrain.errors import InputError
from posttrain.export.periodic import PeriodicExport
from posttrain.hardware import peak_flops
from posttrain.loop import LoopSettings, TrainingLoop, run_folder
from posttrain.models.loading import check_model_exists, flops_per_token, load_tokenizer
from posttrain.orchestration.rank import Rank, build_rank
from posttrain.orchestration.sharded import ShardedEngine, ShardedTrainer, SharedWeights
from posttrain.orchestration.workers import LocalWorker, WorkerGroup, call_all
from posttrain.policy.trainer import ModelFacts, RankSetup
from posttrain.reporting import RunRecorder
from posttrain.roles import Algorithm, Trainer


class Run:
    """A training run, ready to go. Close it to end worker processes."""

    def __init__(self, loaded: LoadedConfig, *, quiet: bool = False, title: str = "") -> None:
        self.loaded = loaded
        self.config: RunConfig = loaded.config
        self.quiet = quiet
        self.title = title
        self._cleanup = ExitStack()
        try:
            self.loop = self._build()
        except BaseException:
            self._cleanup.close()
            raise

    def execute(self) -> int:
        try:
            return self.loop.run()
        finally:
            self._cleanup.close()

    # -- what every algorithm needs --------------------------------------------------------------------------------------

    def _build(self) -> TrainingLoop:
        config = self.config
        if isinstance(config, GrpoRunConfig):
            check_environments(environments_in_use(config), Path.cwd())
        check_model_exists(config.policy.model_name)
        tokenizer = load_tokenizer(config.policy.tokenizer.name)
        form = WholeChatFormat if isinstance(config, RmRunConfig) else ChatFormat
        self.chat: ChatFormat = form(
            tokenizer, config.policy.tokenizer.chat_template, config.policy.tokenizer.chat_template_kwargs or {}
        )
        section = self._section()
        train, validation = load_datasets(config, self.chat, section.seed)
        per_step = samples_per_step(config)
        max_steps = min(section.max_num_steps, section.max_num_epochs * len(train) // per_step)
        if max_steps < 1:
            left_out = "".join(f"; {count} left out: {reason}" for reason, count in train.dropped.items())
            raise DataError(
                f"data.train has {len(train)} usable rows, fewer than the {per_step} of one step{left_out}; "
                "give more data, a smaller step, or more epochs (max_num_epochs)"
            )
        stream = Stream(train, section.seed, config.data.shuffle)
        workers = self._workers(section.seed)
        self._cleanup.callback(workers.close)
        facts = call_all(workers, Rank.facts)[0]
        recorder = self._recorder(workers, facts, max_steps)
        for name, dataset in (("data.train", train), ("data.validation", validation)):
            for reason, count in (dataset.dropped if dataset is not None else {}).items():
                recorder.warn(f"{name}: {count} rows left out: {reason}")
            for reason, count in (dataset.noted if dataset is not None else {}).items():
                recorder.warn(f"{name}: {count} rows: {reason}")
        trainer = ShardedTrainer(
            workers,
            train=self._micro_batching("train", getattr(train, "pack_size", 0)),
            score=self._micro_batching("logprob", getattr(train, "pack_size", 0)),
            seed=section.seed,
            show_progress=recorder.progress,
        )
        algorithm = self._algorithm(stream, validation, workers, trainer, recorder)
        return TrainingLoop(
            settings=self._loop_settings(max_steps),
            algorithm=algorithm,
            recorder=recorder,
            saver=CheckpointSaver(
                self._saver_settings(per_step, len(train) / per_step, on_gpu=facts.device == "cuda"),
                trainer,
                with_surplus(stream, algorithm),
                recorder,
                self._store(recorder),
                self.loaded.to_yaml(),
                self._export(recorder),
            ),
            deadline=SaveDeadline(config.checkpointing.checkpoint_must_save_by),
        )

    def _section(self) -> Any:
        return getattr(self.config, self.loaded.kind)

    def _workers(self, seed: int) -> WorkerGroup:
        config = self.config
        has_reference = (isinstance(config, DpoRunConfig) and needs_reference(config)) or (
            isinstance(config, GrpoRunConfig)
            and (config.loss_fn.reference_policy_kl_penalty != 0 or uses_record(config))
        )
        setup = RankSetup(
            _with_absolute_folders(config.policy),
            seed,
            has_reference,
            self.chat.recorded_template,
            reward_model=isinstance(config, RmRunConfig),
            answer_ends=self.chat.last_token_ids if isinstance(self.chat, WholeChatFormat) else (),
        )
        cluster = config.cluster
        size = cluster.num_nodes * cluster.gpus_per_node
        if cluster.launcher == "local" and size > 1:
            raise InputError(
                f"cluster.launcher: local is one process, but num_nodes x gpus_per_node is {size}; use ray or auto"
            )
        if size == 1 and cluster.launcher != "ray":
            return LocalWorker(build_rank(setup))
        try:
            from posttrain.orchestration.ray_workers import RayWorkers
        except ImportError as error:
            raise InputError(
                f"cluster: {size} ranks need Ray, which is not installed: pip install 'posttrain[ray]'; "
                "or set cluster.num_nodes=1 cluster.gpus_per_node=1"
            ) from error
        return RayWorkers(setup, cluster.num_nodes, cluster.gpus_per_node)

    def _micro_batching(self, which: str, pack_size: int) -> MicroBatching:
        """`pack_size` is the room of precomputed packs, which stay whole; 0: there are none."""
        policy = self.config.policy
        config = self.config
        counts_pairs = isinstance(config, RmRunConfig) or (isinstance(config, DpoRunConfig) and is_paired(config))
        per_sample = 2 if counts_pairs else 1
        size = policy.train_micro_batch_size if which == "train" else policy.logprob_batch_size
        budget = None
        for section in (policy.sequence_packing, policy.dynamic_batching):
            if section.enabled:
                budget = section.train_mb_tokens if which == "train" else section.logprob_mb_tokens
        if pack_size:
            budget = max(budget or 0, pack_size)
        return MicroBatching(
            max_tokens=budget,
            num_responses=size * per_sample,
            algorithm=cast(PackingAlgorithm, policy.sequence_packing.algorithm),
            seed=self._section().seed,
        )

    def _recorder(self, workers: WorkerGroup, facts: ModelFacts, max_steps: int) -> RunRecorder:
        config, kind = self.config, self.loaded.kind
        assert kind != "eval", "an evaluation does not train"
        on_gpu = facts.device == "cuda"
        return RunRecorder(
            run_folder(config.logger.log_dir, config.checkpointing.checkpoint_dir),
            algorithm=kind,
            max_steps=max_steps,
            num_devices=workers.mesh.size,
            peak_flops_per_device=peak_flops(facts.device_name) if on_gpu else None,
            flops_per_token=flops_per_token(facts.config, facts.num_parameters),
            config_yaml=self.loaded.to_yaml(),
            quiet=self.quiet,
            title=self.title or f"{self.loaded.kind.upper()} of {config.policy.model_name}",
            num_val_samples_to_print=config.logger.num_val_samples_to_print,
            device_word="GPU" if on_gpu else "device",
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
        )

    def _export(self, recorder: RunRecorder) -> PeriodicExport | None:
        if not self.config.checkpointing.save_consolidated:
            return None
        return PeriodicExport(recorder.warn, merge_lora=not isinstance(self.config, RmRunConfig))

    def _loop_settings(self, max_steps: int) -> LoopSettings:
        section = self._section()
        return LoopSettings(
            max_steps=max_steps,
            val_period=section.val_period,
            val_start_at=getattr(section, "val_start_at", -1),
            val_at_start=section.val_at_start,
            val_at_end=section.val_at_end,
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

    # -- the algorithms ------------------------------------------------------------------------------------------------

    def _algorithm(
        self, stream: Stream, validation: Any, workers: WorkerGroup, trainer: Trainer, recorder: RunRecorder
    ) -> Algorithm:
        config = self.config
        if isinstance(config, GrpoRunConfig):
            return build_grpo(
                config,
                stream,
                validation,
                trainer,
                ShardedEngine(workers),
                SharedWeights(),
                self.chat,
                recorder.progress,
                self._cleanup,
                recorder.warn,
            )
        if isinstance(config, RmRunConfig):
            return build_rm(config, stream, validation, trainer)
        if isinstance(config, DpoRunConfig):
            return build_preference(config, stream, validation, trainer, recorder.warn)
        held_out = first_rows(validation, config.sft.val_batches * config.sft.val_global_batch_size)
        return Sft(config.policy.train_global_batch_size, trainer, stream, held_out)


def _with_absolute_folders(policy: PolicyConfig) -> PolicyConfig:
    """Ranks may run with another working directory."""

    def absolute(name: str) -> str:
        return str(Path(name).absolute()) if Path(name).is_dir() else name

    tokenizer = policy.tokenizer.model_copy(update={"name": absolute(policy.tokenizer.name)})
    return policy.model_copy(update={"model_name": absolute(policy.model_name), "tokenizer": tokenizer})
