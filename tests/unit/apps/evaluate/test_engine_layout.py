"""How many engines an evaluation starts, where, what each of them gets, and in which number format."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from posttrain.apps.evaluate import model as engines
from posttrain.apps.evaluate.model import native_precision, vllm_precision
from posttrain.cli.main import main
from posttrain.config import load_config
from posttrain.errors import InputError
from posttrain.models.accepted_names import ResolvedModel
from posttrain.orchestration.workers import RankLayout

MODEL = ResolvedModel("some/model", "hub", "some/model", "some/model")
VLLM = "generation.backend=vllm"
TWO = "generation.vllm_cfg.tensor_parallel_size=2"


@pytest.mark.parametrize(
    ("words", "nodes", "per_node", "gpus", "devices"),
    [
        ([], 1, 1, 1, 1),
        (["cluster.gpus_per_node=8"], 1, 8, 1, 8),
        (["cluster.gpus_per_node=8", "cluster.num_nodes=2"], 2, 8, 1, 16),
        ([VLLM, "cluster.gpus_per_node=8"], 1, 8, 1, 8),
        ([VLLM, TWO, "cluster.gpus_per_node=8"], 1, 4, 2, 8),
        ([VLLM, TWO], 1, 1, 2, 2),
    ],
)
def test_engines_fill_the_gpus_of_the_cluster(
    monkeypatch: pytest.MonkeyPatch, words: list[str], nodes: int, per_node: int, gpus: int, devices: int
) -> None:
    started: list[tuple[partial[Any], RankLayout]] = []
    monkeypatch.setattr(
        engines, "start_workers", lambda build, layout, launcher, quiet: started.append((build, layout))
    )
    config = load_config("eval", None, words).config
    engines.start_engines(config, MODEL)
    build, layout = started[0]
    assert (layout.num_nodes, layout.ranks_per_node, layout.gpus_per_rank) == (nodes, per_node, gpus)
    assert not layout.is_process_group, "engines are independent of each other"
    assert (config.num_engines, config.num_devices) == (nodes * per_node, devices)
    several = VLLM in words and layout.num_ranks > 1
    assert (build.args[1].vllm_kwargs.get("distributed_executor_backend") == "mp") == several


def test_a_named_model_of_a_server_is_not_looked_for_here(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def build(loaded: Any, **_: object) -> None:
        built.append(loaded.config.generation.model_name)
        raise InputError("far enough")

    monkeypatch.setattr("posttrain.apps.evaluate.build.EvaluationBuild", build)
    words = ["generation.backend=openai_url", "generation.openai_cfg.url=http://127.0.0.1:1/v1"]
    assert main(["eval", *words, "generation.model_name=a-model-of-the-server"]) == 64
    assert built == ["a-model-of-the-server"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "auto"),
        (["generation.precision=bfloat16"], "bfloat16"),
        (["generation.vllm_cfg.precision=float32"], "float32"),
        (["generation.vllm_cfg.precision=bfloat16"], "auto"),
        (["generation.precision=bfloat16", "generation.vllm_cfg.precision=float32"], "bfloat16"),
    ],
)
def test_float32_under_vllm_cfg_holds_for_the_native_engine(words: list[str], expected: str) -> None:
    assert native_precision(load_config("eval", None, words).config.generation) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "bfloat16"),
        (["generation.precision=float32"], "float32"),
        (["generation.vllm_cfg.precision=float32"], "float32"),
        (["generation.vllm_cfg.precision=null"], "auto"),
    ],
)
def test_vllm_reads_both(words: list[str], expected: str) -> None:
    assert vllm_precision(load_config("eval", None, words).config.generation) == expected
