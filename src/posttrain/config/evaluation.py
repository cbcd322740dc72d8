"""The config of `posttrain eval`: NeMo RL's evaluation keys, and what posttrain adds to them.

Unlike a training run there is one dataset, whose keys stand directly under `data`, and the model is a key of
`generation`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from posttrain.config.base import (
    FreeMap,
    IsSetByUser,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    setting,
)
from posttrain.config.data import EnvironmentConfig
from posttrain.config.policy import NativeConfig, Temperature, TokenizerConfig, TopK, TopP, VllmConfig
from posttrain.config.rewards import RewardModelRewardConfig
from posttrain.config.run_config import ClusterConfig


class EvalConfig(Section):
    metric: Literal["pass@k", "cons@k", "avg@k"] = setting(
        "pass@k", "The score: any of k samples passes, their majority passes, or the mean reward."
    )
    k_value: PositiveInt = setting(1, "The k of the metric, in samples per problem.")
    num_tests_per_prompt: PositiveInt = setting(1, "Samples drawn for each problem; at least k.")
    seed: NonNegativeInt = setting(42, "Seed of sampling, of resampling and of the order of choices.")
    save_path: str | None = setting(
        None, "Folder of the results; null is one under results/eval that model, dataset and settings name."
    )
    pass_threshold: float = setting(1.0, "A sample passes if its reward is at least this.")
    confidence: float = setting(0.95, "Confidence of the intervals, as a share.", gt=0, lt=1)
    bootstrap_resamples: PositiveInt = setting(10_000, "How often the problems are drawn again for the intervals.")
    max_rollout_turns: PositiveInt = setting(
        1, "Turns of the model in one answer, if the environment has `turns` or `agent`."
    )
    max_problems: PositiveInt | None = setting(None, "Only so many problems, the first of the dataset; null is all.")
    gpu_hour_price: NonNegativeFloat | None = setting(
        None, "Price of one GPU (or machine) for one hour, in any currency; null shows no cost."
    )


class OpenAiConfig(Section):
    url: str | None = setting(None, "Base URL of the API, with /v1; null is generation.model_name if that is a URL.")
    model: str | None = setting(None, "Name of the model there; null is the first that it lists.")
    api: Literal["chat", "completions"] = setting("chat", "Messages to /chat/completions, or text to /completions.")
    api_key_env_var: str = setting("OPENAI_API_KEY", "Environment variable with the key; none is sent if it is unset.")
    num_concurrent: PositiveInt = setting(16, "Requests under way at the same time.")
    max_retries: NonNegativeInt = setting(5, "Further attempts after a request that failed.")
    timeout_s: PositiveFloat = setting(600.0, "Seconds after which one request is given up.")
    extra_body: FreeMap = setting(dict, "Further fields of each request, sent as they are.")


class EvalGenerationConfig(Section):
    backend: Literal["native", "vllm", "openai_url"] = setting(
        "native", "Engine that samples: native, vllm, or openai_url for a server."
    )
    model_name: str = setting(
        ...,
        "Model: a folder, an adapter, a checkpoint step_N, a run's folder, a hub name, registry:NAME@STAGE or a "
        "server's URL.",
    )
    precision: Literal["auto", "float32", "bfloat16"] = setting(
        "auto",
        "Number format of the weights; auto is vllm_cfg.precision with vLLM, and with the native engine float32 on a "
        "CPU or where vllm_cfg.precision is float32, else bfloat16.",
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "Where the model lives; auto prefers cuda.")
    num_threads: PositiveInt | None = setting(None, "CPU threads; null lets PyTorch decide.")
    max_new_tokens: PositiveInt = setting(..., "Longest answer in tokens; max_model_len bounds it as well.")
    temperature: Temperature = setting(0.0, "Divides the logits; 0 is greedy.")
    top_p: TopP = setting(1.0, "Samples from the smallest set with this much probability; 1 is off.")
    top_k: TopK | None = setting(-1, "Samples from this many likeliest tokens; null, 0 or -1 is off.")
    num_prompts_per_step: int = setting(-1, "Problems that are sampled, scored and saved together; -1 picks a number.")
    stop_token_ids: list[int] | None = setting(None, "Token ids that end an answer; null is the model's own.")
    stop_strings: list[str] | None = setting(None, "Texts that end an answer; they stay in it.")
    ignore_eos: bool = setting(False, "Samples exactly max_new_tokens, for benchmarks.")
    native_cfg: NativeConfig = setting(NativeConfig, "Settings of the native engine.")
    vllm_cfg: VllmConfig = setting(VllmConfig, "Settings of vLLM; max_model_len holds for every engine.")
    vllm_kwargs: FreeMap = setting(dict, "Passed to vLLM as they are.")
    openai_cfg: OpenAiConfig = setting(OpenAiConfig, "Settings of a server.")


class EvalDataConfig(Section):
    dataset_name: str = setting(
        ..., "A benchmark such as math500 (`posttrain eval --list` has all), a hub name, a file or a URL."
    )
    data_path: str | None = setting(None, "File, folder or URL with the benchmark's rows; null fetches from the hub.")
    subset: str | None = setting(None, "Configuration of a hub dataset.")
    split: str | None = setting(None, "Split of a hub dataset; null is the benchmark's test split.")
    file_format: Literal["csv", "json", "jsonl", "parquet"] | None = setting(
        None, "Format of a file; null is what its name ends in."
    )
    problem_key: str | None = setting(None, "Column with the problem; null is the benchmark's own.")
    solution_key: str | None = setting(None, "Column with the expected answer; null is the benchmark's own.")
    choices_key: str | None = setting(None, "Column with the choices of a problem; null is the benchmark's own.")
    id_key: str | None = setting(None, "Column that names a problem; null is `id`, or its number.")
    max_input_seq_length: PositiveInt | None = setting(None, "Longest prompt in tokens; a longer one is an error.")
    prompt_file: str | None = setting(None, "Text file with one {} for the problem; null is the benchmark's own.")
    system_prompt_file: str | None = setting(None, "Text file with the system message; null sends none.")
    image_key: str | None = setting(None, 'Column with images; null is the usual ones, "" is none.')
    image_dir: str | None = setting(None, "Folder that holds the images that rows name; null is that of the data file.")
    allow_image_urls: bool | None = setting(None, "Fetches images that rows name by http(s) URLs; null refuses them.")
    env_name: str | None = setting(None, "Key under `env` that judges; null is the one besides `math`, or else `math`.")
    download_dir: str | None = setting(None, "Folder for downloaded data.")


class EvalRunConfig(Section):
    eval: EvalConfig = setting(EvalConfig, "What is measured.")
    generation: EvalGenerationConfig = setting(..., "Which model answers, and how it is sampled.")
    tokenizer: TokenizerConfig = setting(..., "The tokenizer and its chat template.")
    data: EvalDataConfig = setting(..., "The problems.")
    env: dict[str, EnvironmentConfig] = setting(dict, "Judges of answers, by name.")
    cluster: ClusterConfig = setting(ClusterConfig, "Machines.")

    @property
    def metric_name(self) -> str:
        return self.eval.metric.replace("k", str(self.eval.k_value))

    @property
    def judge(self) -> str:
        """The key under `env` that judges."""
        others = [name for name in self.env if name != "math"]
        return self.data.env_name or (others[0] if others else "math")

    @property
    def gpus_per_engine(self) -> int:
        vllm = self.generation.vllm_cfg
        return vllm.tensor_parallel_size * vllm.pipeline_parallel_size if self.generation.backend == "vllm" else 1

    @property
    def engines_per_node(self) -> int:
        """Engines that sample side by side on each machine, each with the whole model."""
        return 1 if self.server_url is not None else max(1, self.cluster.gpus_per_node // self.gpus_per_engine)

    @property
    def num_engines(self) -> int:
        return self.engines_per_node * (1 if self.server_url is not None else self.cluster.num_nodes)

    @property
    def num_devices(self) -> int:
        """GPUs (or CPU workers) that the evaluation keeps busy."""
        return 1 if self.server_url is not None else self.num_engines * self.gpus_per_engine

    @property
    def server_url(self) -> str | None:
        """The address of the server that answers, if one does."""
        generation = self.generation
        is_url = generation.model_name.startswith(("http://", "https://"))
        if generation.openai_cfg.url is not None:
            return generation.openai_cfg.url if is_url or generation.backend == "openai_url" else None
        return generation.model_name if is_url else None

    def problems(self, is_set: IsSetByUser) -> Iterator[str]:
        wanted, generation = self.eval, self.generation
        for name, environment in self.env.items():
            yield from environment.turns_problems(name)
            for part, reward in environment.reward_configs(name).items():
                if isinstance(reward, RewardModelRewardConfig) and reward.resources is not None:
                    field = f"env.{name}.rewards.{part}" if part else f"env.{name}"
                    yield f"{field}.resources: an evaluation scores in its own process; remove it"
        if wanted.k_value > wanted.num_tests_per_prompt:
            yield (
                f"eval.k_value = {wanted.k_value} is more than eval.num_tests_per_prompt = "
                f"{wanted.num_tests_per_prompt}: {self.metric_name} needs at least {wanted.k_value} samples of each "
                "problem"
            )
        if wanted.num_tests_per_prompt > 1 and (generation.temperature == 0 or generation.top_k == 1):
            yield (
                f"eval.num_tests_per_prompt = {wanted.num_tests_per_prompt} with generation.temperature = "
                f"{generation.temperature:g} and top_k = {generation.top_k}: all samples of a problem would be the "
                "same; set generation.temperature above 0, or one sample"
            )
        if generation.num_prompts_per_step == 0 or generation.num_prompts_per_step < -1:
            yield f"generation.num_prompts_per_step = {generation.num_prompts_per_step}: a positive number, or -1"
        if generation.backend == "openai_url" and self.server_url is None:
            yield "generation.backend = openai_url needs generation.openai_cfg.url, or a URL as generation.model_name"
        if self.judge not in self.env:
            known = ", ".join(sorted(self.env)) or "nothing"
            yield f"data.env_name: judged by env.{self.judge}, which is not there; under env: there is {known}"
        if self.data.env_name is None and len(self.env) > 2:
            yield f"data.env_name is null and env has {', '.join(self.env)}: say which of them judges"
        block = self.env.get(self.judge)
        key = "" if block is None or not block.takes_turns else "turns" if block.turns is not None else "agent"
        if key and self.server_url is not None:
            yield (
                f"env.{self.judge}.{key} = {getattr(block, key)!r}: a conversation of several turns continues the "
                "model's own tokens, and a server gives text alone; name the weights instead of a URL, with "
                "generation.backend native or vllm"
            )
        if key and wanted.max_rollout_turns < 2:
            yield (
                f"env.{self.judge}.{key} takes turns with the model, but eval.max_rollout_turns = "
                f"{wanted.max_rollout_turns} ends a conversation before the model can read what the environment "
                f"returns: set it to 2 or more, or remove the {key}"
            )

    def cautions(self, is_set: IsSetByUser) -> Iterator[str]:
        on_server, vllm = self.server_url is not None, self.generation.vllm_cfg
        sizes = ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size")
        ignored = [f"generation.vllm_cfg.{key}" for key in sizes if getattr(vllm, key) > 1]
        if ignored and (on_server or self.generation.backend == "native"):
            engine = "the server" if on_server else "the native engine"
            yield f"{', '.join(ignored)}: for generation.backend=vllm; {engine} does not use it"
        asked, used = self.cluster.num_workers, self.num_devices
        if asked > used and not on_server:
            each = f"generation.vllm_cfg.tensor_parallel_size x pipeline_parallel_size = {self.gpus_per_engine}"
            yield f"cluster: {asked} GPUs are requested, {used} are used: an engine takes {each} of one machine"
