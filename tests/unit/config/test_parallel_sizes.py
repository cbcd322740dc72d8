"""`policy.dtensor_cfg.*_parallel_size`: which arrangements of ranks a config may ask for."""

import pytest

from posttrain.config import ConfigError, GrpoRunConfig, load_config

TP, CP = "policy.dtensor_cfg.tensor_parallel_size", "policy.dtensor_cfg.context_parallel_size"
REPLICAS = "policy.dtensor_cfg.dp_replicate_size"
EP = "policy.dtensor_cfg.expert_parallel_size"
EIGHT = "cluster.gpus_per_node=8"


@pytest.mark.parametrize(
    "words",
    [
        [f"{TP}=8"],
        [f"{EP}=8"],
        [f"{EP}=4", f"{TP}=2"],
        [f"{EP}=4", f"{CP}=4"],
        [f"{TP}=2", f"{CP}=2", f"{REPLICAS}=2"],
        [f"{REPLICAS}=null"],
        ["cluster.num_nodes=2", f"{TP}=4"],
    ],
)
def test_sizes_that_divide_the_ranks_are_accepted(words: list[str]) -> None:
    assert load_config("dpo", None, [EIGHT, *words]).warnings == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([f"{TP}=3"], "tensor_parallel_size 3 x .* = 3 must divide .* gpus_per_node = 8"),
        ([f"{TP}=4", f"{CP}=4"], "= 16 must divide"),
        ([f"{REPLICAS}=5"], "dp_replicate_size 5"),
        (["cluster.num_nodes=2", f"{TP}=16"], "must divide cluster.gpus_per_node = 8: .* on one machine"),
        (
            [f"{TP}=2", "policy.optimizer.state_dtype=int8"],
            "policy.optimizer.state_dtype = int8 with .*tensor_parallel_size",
        ),
        ([f"{TP}=2", "policy.optimizer.master_weights=none"], "policy.optimizer.master_weights = none with"),
        (["policy.dtensor_cfg.sequence_parallel=true"], "sequence_parallel.*not implemented"),
        ([f"{EP}=3"], "expert_parallel_size = 3 must divide the 8 ranks that hold different shards"),
        ([f"{EP}=4", f"{TP}=2", f"{REPLICAS}=2"], "expert_parallel_size = 4 must divide the 2 ranks"),
        (["policy.router_replay.enabled=true"], "router_replay.enabled = true .* this run samples nothing"),
        (["policy.router_replay.enabled=true", f"{CP}=2"], "router_replay.enabled = true with .*context_parallel_size"),
        (["policy.dtensor_cfg.cpu_offload=true"], "cpu_offload.*not implemented"),
        ([f"{TP}=0"], "tensor_parallel_size"),
    ],
)
def test_other_sizes_and_what_does_not_go_with_them_are_refused_by_name(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("dpo", None, [EIGHT, *words])


def test_ranks_that_share_layers_count_as_one_sampler_of_a_round() -> None:
    words = [EIGHT, "grpo.async_grpo.enabled=true", "grpo.num_prompts_per_step=4", "policy.train_global_batch_size=16"]
    words += ["grpo.num_generations_per_prompt=4", "data.default.env_name=math"]
    with pytest.raises(ConfigError, match="not a multiple of the 8 ranks that sample"):
        load_config("grpo", None, words)
    load_config("grpo", None, [*words, f"{TP}=2"])


# -- GPUs that only sample ---------------------------------------------------------------------------------------------

ASYNC = "grpo.async_grpo.enabled=true"
DEDICATED = "policy.generation.colocated.enabled=false"
ENGINE_TP = "policy.generation.vllm_cfg.tensor_parallel_size"
GPUS, NODES = (f"policy.generation.colocated.resources.{name}" for name in ("gpus_per_node", "num_nodes"))


def grpo_config(*words: str) -> GrpoRunConfig:
    sizes = ["grpo.num_prompts_per_step=12", "grpo.num_generations_per_prompt=4", "policy.train_global_batch_size=48"]
    config = load_config("grpo", None, [EIGHT, "data.default.env_name=math", *sizes, *words]).config
    assert isinstance(config, GrpoRunConfig)
    return config


@pytest.mark.parametrize(
    ("words", "num_ranks", "num_engines"),
    [
        ([], 8, 0),
        ([DEDICATED, f"{GPUS}=2"], 6, 2),
        ([DEDICATED, f"{GPUS}=2", f"{NODES}=1"], 6, 2),
        ([DEDICATED, "cluster.num_nodes=3", f"{NODES}=1"], 16, 8),
        ([DEDICATED, "cluster.num_nodes=3", f"{NODES}=2", f"{GPUS}=8"], 8, 16),
        ([DEDICATED, f"{GPUS}=2", f"{TP}=2"], 6, 2),
        ([DEDICATED, f"{GPUS}=4", f"{ENGINE_TP}=2"], 4, 2),
        ([DEDICATED, "cluster.num_nodes=3", f"{NODES}=1", f"{ENGINE_TP}=4"], 16, 2),
        ([f"{ENGINE_TP}=2"], 8, 0),
    ],
)
def test_engines_take_gpus_of_the_only_machine_or_whole_machines(
    words: list[str], num_ranks: int, num_engines: int
) -> None:
    config = grpo_config(*words)
    assert (config.num_ranks, config.num_engines) == (num_ranks, num_engines)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([DEDICATED], "needs .*resources.gpus_per_node, .*cluster.gpus_per_node = 8; it is null"),
        ([DEDICATED, f"{GPUS}=8"], "it is 8, and at least one must be left to train"),
        ([DEDICATED, f"{GPUS}=2", f"{NODES}=2"], "resources.num_nodes = 2, but cluster.num_nodes = 1"),
        ([DEDICATED, "cluster.num_nodes=2"], "needs .*resources.num_nodes"),
        ([DEDICATED, "cluster.num_nodes=2", f"{NODES}=1", f"{GPUS}=4"], "of several machines, whole ones sample"),
        ([DEDICATED, f"{GPUS}=2", f"{TP}=4"], "must divide the number of ranks, .* less what only samples = 6"),
        ([DEDICATED, f"{GPUS}=3", f"{ENGINE_TP}=2"], "vllm_cfg.tensor_parallel_size = 2 must divide the 3 GPUs"),
        ([DEDICATED, "cluster.num_nodes=2", f"{NODES}=1", f"{ENGINE_TP}=3"], "= 3 must divide the 8 GPUs"),
        ([DEDICATED, f"{GPUS}=5", ASYNC], "not a multiple of the 5 engines"),
        ([DEDICATED, f"{GPUS}=2", ASYNC, "grpo.async_grpo.groups_in_flight=2"], "max_trajectory_age_steps = 1"),
    ],
)
def test_places_that_do_not_add_up_are_refused_by_name(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        grpo_config(*words)


@pytest.mark.parametrize(
    ("words", "ahead", "num_in_flight"),
    [
        ([ASYNC, f"{GPUS}=4"], 1, 12),
        ([ASYNC, f"{GPUS}=4", "grpo.async_grpo.max_trajectory_age_steps=2"], 1, 18),
        ([ASYNC, f"{GPUS}=4", "grpo.async_grpo.max_trajectory_age_steps=0"], 0, 12),
        ([f"{GPUS}=4"], 0, 18),
    ],
)
def test_rounds_run_ahead_where_engines_have_gpus_of_their_own_and_the_age_allows_it(
    words: list[str], ahead: int, num_in_flight: int
) -> None:
    config = grpo_config(DEDICATED, *words)
    assert (config.rounds_ahead, config.num_groups_in_flight) == (ahead, num_in_flight)


def test_a_vllm_on_gpus_of_its_own_splits_its_layers_itself() -> None:
    vllm = ["policy.generation.backend=vllm", "policy.generation.vllm_cfg.python=/env/bin/python"]
    words = [DEDICATED, f"{GPUS}=4", f"{ENGINE_TP}=2"]
    native, config = grpo_config(*words), grpo_config(*words, *vllm)
    assert (config.num_engines, config.gpus_per_engine, config.num_ranks) == (2, 2, 4)
    assert (native.vllm_spans_gpus, config.vllm_spans_gpus) == (False, True)
    assert not grpo_config(DEDICATED, f"{GPUS}=4", *vllm).vllm_spans_gpus


def test_gpus_for_sampling_are_said_to_be_unused_where_all_gpus_train() -> None:
    words = [EIGHT, "data.default.env_name=math", f"{GPUS}=2"]
    [warning] = load_config("grpo", None, words).warnings
    assert "resources.gpus_per_node = 2: policy.generation.colocated.enabled is true" in warning
    assert load_config("grpo", None, [*words, DEDICATED]).warnings == []
    assert load_config("grpo", None, [*words[:2], f"{GPUS}=8"]).warnings == [], "all of them: what is done"


def test_the_size_of_an_engine_is_said_to_be_ignored_only_where_the_gpus_that_train_sample() -> None:
    words = [EIGHT, "data.default.env_name=math", f"{ENGINE_TP}=2"]
    assert any(ENGINE_TP in warning for warning in load_config("grpo", None, words).warnings)
    own = load_config("grpo", None, [*words, DEDICATED, f"{GPUS}=2"])
    assert not any(ENGINE_TP in warning for warning in own.warnings)
