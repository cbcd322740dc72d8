"""`policy.dtensor_cfg.*_parallel_size`: which arrangements of ranks a config may ask for."""

import pytest

from posttrain.config import ConfigError, GrpoRunConfig, load_config

TP, CP = "policy.dtensor_cfg.tensor_parallel_size", "policy.dtensor_cfg.context_parallel_size"
REPLICAS = "policy.dtensor_cfg.dp_replicate_size"
EP = "policy.dtensor_cfg.expert_parallel_size"
OFFLOAD = "policy.dtensor_cfg.cpu_offload=true"
ROWS = "policy.dtensor_cfg.sequence_parallel=true"
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
        ([ROWS, f"{TP}=2", f"{EP}=2"], "sequence_parallel = true with expert_parallel_size = 2"),
        ([f"{EP}=3"], "expert_parallel_size = 3 must divide the 8 ranks that hold different shards"),
        ([f"{EP}=4", f"{TP}=2", f"{REPLICAS}=2"], "expert_parallel_size = 4 must divide the 2 ranks"),
        (["policy.router_replay.enabled=true"], "router_replay.enabled = true .* this run samples nothing"),
        (["policy.router_replay.enabled=true", f"{CP}=2"], "router_replay.enabled = true with .*context_parallel_size"),
        ([OFFLOAD, f"{EP}=2"], "cpu_offload = true with .*expert_parallel_size = 2"),
        ([OFFLOAD, "policy.fp8=true"], "cpu_offload = true with policy.fp8"),
        ([f"{TP}=0"], "tensor_parallel_size"),
    ],
)
def test_other_sizes_and_what_does_not_go_with_them_are_refused_by_name(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("dpo", None, [EIGHT, *words])


def test_rows_split_by_ranks_that_share_no_layers_are_said_to_have_no_effect() -> None:
    assert "no effect" in load_config("dpo", None, [EIGHT, ROWS]).warnings[0]
    assert load_config("dpo", None, [EIGHT, ROWS, f"{TP}=2"]).warnings == []


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
        ([DEDICATED, "cluster.num_nodes=2", f"{NODES}=2", f"{GPUS}=2"], 12, 4),
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
        ([DEDICATED, f"{GPUS}=8"], "it is 8, and at least one GPU must be left to train"),
        ([DEDICATED, f"{GPUS}=2", f"{NODES}=2"], "resources.num_nodes = 2, but cluster.num_nodes = 1"),
        ([DEDICATED, "cluster.num_nodes=2"], "needs .*resources.num_nodes"),
        ([DEDICATED, "cluster.num_nodes=2", f"{NODES}=1", f"{GPUS}=9"], "= 9, but cluster.gpus_per_node = 8; lower"),
        ([DEDICATED, "cluster.num_nodes=2", f"{NODES}=2"], "it is 2, and at least one GPU must be left to train"),
        ([DEDICATED, f"{GPUS}=2", f"{TP}=4"], "must divide the number of ranks, .* less what has GPUs of its own = 6"),
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


# -- a reference on GPUs of its own ------------------------------------------------------------------------------------

REFERENCE = "policy.reference.colocated.enabled=false"
ITS_GPUS, ITS_NODES = (f"policy.reference.colocated.resources.{name}" for name in ("gpus_per_node", "num_nodes"))
TWO_BY_TWO = ["cluster.num_nodes=2", "cluster.gpus_per_node=2"]
ONE_GPU = [DEDICATED, f"{NODES}=1", f"{GPUS}=1", REFERENCE, f"{ITS_NODES}=1", f"{ITS_GPUS}=1"]


@pytest.mark.parametrize(
    ("words", "machines"),
    [
        ([REFERENCE, f"{ITS_GPUS}=2"], {"rank": (0,) * 6, "reference": (0, 0)}),
        ([*TWO_BY_TWO, *ONE_GPU], {"rank": (0, 0), "engine": (1,), "reference": (1,)}),
        ([*TWO_BY_TWO, REFERENCE, f"{ITS_NODES}=2", f"{ITS_GPUS}=1"], {"rank": (0, 1), "reference": (0, 1)}),
        ([*TWO_BY_TWO, REFERENCE, f"{ITS_NODES}=1"], {"rank": (0, 0), "reference": (1, 1)}),
        (  # the largest first: it needs a machine that is still free
            [*TWO_BY_TWO, DEDICATED, f"{NODES}=1", f"{GPUS}=1", REFERENCE, f"{ITS_NODES}=1"],
            {"rank": (0,), "engine": (0,), "reference": (1, 1)},
        ),
    ],
)
def test_groups_are_placed_on_the_last_machines_with_room(words: list[str], machines: dict[str, tuple[int]]) -> None:
    placement = grpo_config(*words).placement
    assert {"rank": placement.ranks, **{group.name: group.machines for group in placement.groups}} == machines


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([REFERENCE], "policy.reference.colocated.enabled = false needs .*resources.gpus_per_node, .* = 8; it is null"),
        ([REFERENCE, "cluster.gpus_per_node=1", f"{ITS_GPUS}=1"], "it is 1, and at least one GPU must be left"),
        ([REFERENCE, f"{ITS_GPUS}=9"], "it is 9, and at least one GPU must be left to train"),
        ([f"{ITS_GPUS}=1"], "resources.gpus_per_node = 1, but policy.reference.colocated.enabled is true"),
        ([REFERENCE, f"{ITS_GPUS}=1", "loss_fn.reference_policy_kl_penalty=0"], "this run has no reference policy"),
        ([REFERENCE, f"{ITS_GPUS}=3", f"{TP}=2"], "tensor_parallel_size = 2 must divide the 3 GPUs of a machine"),
        ([REFERENCE, f"{ITS_GPUS}=4", DEDICATED, f"{GPUS}=4"], "1 x 8 are all given away .engine 1 x 4, reference 1"),
        ([REFERENCE, f"{ITS_GPUS}=5", DEDICATED, f"{GPUS}=4"], "engine does not fit: .* 1 x 8, but engi"),
        ([*TWO_BY_TWO, *ONE_GPU[:-1], f"{TP}=2"], "less what has GPUs of its own = 1"),
    ],
)
def test_a_reference_that_cannot_be_placed_is_refused_by_name(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        grpo_config(*words)


# -- reward models on GPUs of their own --------------------------------------------------------------------------------

RM = ["data.default.env_name=rm", "env.rm={type: reward_model, model_name: a}"]
TWO_REWARDS = "env.rm={rewards: {a: {type: reward_model, model_name: a, resources: {gpus_per_node: 1}}, "
TWO_REWARDS += "b: {type: reward_model, model_name: a, resources: {gpus_per_node: 1}}}}"
SAME_NAME = "env.rm_a={type: reward_model, model_name: c, resources: {gpus_per_node: 1}}"


def test_policy_and_engine_are_on_the_first_of_two_machines_reference_and_reward_model_on_the_second() -> None:
    config = grpo_config(*TWO_BY_TWO, *ONE_GPU, *RM, "env.rm.resources={num_nodes: 1, gpus_per_node: 1}")
    placement = config.placement
    assert {group.name: group.machines for group in placement.groups} == {
        "engine": (0,),
        "reference": (1,),
        "reward_rm": (1,),
    }
    assert placement.ranks == (0,)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*RM, "env.rm.resources={num_nodes: 1}"], "env.rm.resources needs env.rm.resources.gpus_per_node.* is null"),
        ([*RM, "env.rm.resources={}"], "env.rm.resources needs env.rm.resources.gpus_per_node"),
        ([*RM, "env.rm.resources={gpus_per_node: 9}"], "it is 9, and at least one GPU must be left to train"),
        ([*RM, "env.rm.resources={gpus: 9}"], r"command line: `env\.rm\.resources\.gpus`.*gpus_per_node"),
        (
            ["data.train.env_name=rm", "data.validation={data_path: b.jsonl, env_name: rm_a}", TWO_REWARDS, SAME_NAME],
            "env.rm_a.resources: its worker group would have the name of that of env.rm.rewards.a",
        ),
        ([RM[0], TWO_REWARDS], "env.rm.rewards.b.resources: env.rm.rewards.a has 'a' on GPUs of its own already"),
        (["env.math.resources={gpus_per_node: 1}"], "resources"),
        ([*RM, "env.rm.resources={gpus_per_node: 1}", "cluster.launcher=local"], "cluster.launcher = 'local'"),
    ],
)
def test_a_reward_model_that_cannot_be_placed_is_refused_by_name(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        grpo_config(*words)


def test_the_reward_model_of_an_environment_that_no_dataset_names_has_no_place() -> None:
    unused = "env.rm={type: reward_model, model_name: a, resources: {gpus_per_node: 1}}"
    assert grpo_config(unused).num_ranks == 8
