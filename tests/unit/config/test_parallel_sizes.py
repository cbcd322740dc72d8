"""`policy.dtensor_cfg.*_parallel_size`: which arrangements of ranks a config may ask for."""

import pytest

from posttrain.config import ConfigError, load_config

TP, CP = "policy.dtensor_cfg.tensor_parallel_size", "policy.dtensor_cfg.context_parallel_size"
REPLICAS = "policy.dtensor_cfg.dp_replicate_size"
EIGHT = "cluster.gpus_per_node=8"


@pytest.mark.parametrize(
    "words",
    [[f"{TP}=8"], [f"{TP}=2", f"{CP}=2", f"{REPLICAS}=2"], [f"{REPLICAS}=null"], ["cluster.num_nodes=2", f"{TP}=4"]],
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
        (["policy.dtensor_cfg.expert_parallel_size=2"], "expert_parallel_size.*not implemented"),
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
