"""Which iteration a run works on, what it reuses, and what it prints. Only stages without a model run here."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_pipelines
import tiny_runs

from posttrain.apps.demo.arithmetic import build_tokenizer
from posttrain.apps.ship.pipeline.iteration_models import choose_models
from posttrain.apps.ship.pipeline.records import Iteration, read_iterations
from posttrain.apps.ship.pipeline.runner import PipelineRunner, RunRequest
from posttrain.config.pipeline import PipelineConfig
from posttrain.data.chat import ChatFormat
from posttrain.data.datasets import load_task_dataset
from posttrain.data.traces import TraceGroup, iter_trace_groups

UNTIL_DATASET = RunRequest(until="dataset")


@pytest.fixture
def world(tmp_path: Path) -> Path:
    return tiny_pipelines.save_world(tmp_path / "world")


def config_of(world: Path, **sections: object) -> PipelineConfig:
    return PipelineConfig.model_validate({**tiny_pipelines.settings(world, world / "home"), **sections})


def run(config: PipelineConfig, request: RunRequest = UNTIL_DATASET) -> tuple[Iteration, list[str]]:
    said: list[str] = []
    assert PipelineRunner(config, said.append).run(request) == 0
    return read_iterations(Path(config.pipeline.folder))[-1], said


def finish(iteration: Iteration) -> None:
    """As if the rest had run, too."""
    replace(iteration, finished=True).write()


def add_traces(world: Path, count: int = 4) -> None:
    rows = [json.loads(line) for line in (world / "traces.jsonl").read_text().splitlines()]
    tiny_runs.write_rows(world / "traces.jsonl", [*rows, *tiny_runs.traces(count, 6, seed=5)])


def test_unfinished_iteration_continues_with_its_traces(world: Path) -> None:
    config = config_of(world)
    first, _ = run(config)
    add_traces(world)
    again, said = run(config)
    assert again.number == 1
    assert again.stages == first.stages
    assert "continues with those" in said[0]
    new, said = run(config, RunRequest(until="dataset", new_iteration=True))
    assert new.number == 2
    assert new.data != first.data
    assert "the traces changed" in said[1]


def test_unfinished_iteration_without_dataset_reads_the_new_traces(world: Path) -> None:
    first, _ = run(config_of(world))
    add_traces(world)
    other = config_of(world, dataset={"pairs": {"strategy": "all"}})
    again, _ = run(other)
    assert again.number == 1
    assert again.data != first.data
    record = again.record("dataset")
    assert record is not None
    assert record.outcome.values["rows"] > 20 * 9 - 1


def test_a_finished_iteration_is_followed_by_one_with_the_new_traces(world: Path) -> None:
    config = config_of(world)
    finish(run(config)[0])
    same, said = run(config)
    assert same.number == 1
    assert all("unchanged" in line for line in said)
    add_traces(world)
    new, said = run(config)
    assert new.number == 2
    assert said[0].startswith("iteration 2 begins: the traces have changed; it trains")


def test_numbers_are_not_given_twice_when_old_iterations_are_removed(world: Path) -> None:
    config = config_of(world)
    finish(run(config)[0])
    again = RunRequest(until="dataset", new_iteration=True)
    finish(run(config, again)[0])
    shutil.rmtree(world / "home" / "iteration_1")
    assert run(config, again)[0].number == 3
    assert [iteration.number for iteration in read_iterations(world / "home")] == [2, 3]


def test_traces_that_change_nothing_in_the_dataset_are_not_trained_on_again(world: Path) -> None:
    config = config_of(world, traces={"path": str(world / "traces.jsonl"), "filters": {"where": {"good": [True]}}})
    rows = [{**row, "good": True} for row in tiny_runs.traces(20, 6)]
    tiny_runs.write_rows(world / "traces.jsonl", rows)
    first = run(config)[0]
    finish(first)
    strangers = [{**row, "good": False} for row in tiny_runs.traces(3, 6, seed=8)]
    tiny_runs.write_rows(world / "traces.jsonl", [*rows, *strangers])
    second, _ = run(config)
    assert second.number == 2
    before, after = first.record("dataset"), second.record("dataset")
    assert before is not None
    assert after is not None
    assert before.folder != after.folder
    assert before.outcome.digest == after.outcome.digest, "so everything after it is reused"


def test_the_same_content_under_another_name_is_the_same_data(world: Path) -> None:
    finish(run(config_of(world))[0])
    (world / "traces.jsonl").rename(world / "moved.jsonl")
    moved, said = run(config_of(world, traces={"path": str(world / "moved.jsonl")}))
    assert moved.number == 1
    assert all("unchanged" in line for line in said)


def test_a_changed_setting_runs_its_stage_and_going_back_finds_the_old_result(world: Path) -> None:
    first = run(config_of(world))[0]
    other, said = run(config_of(world, dataset={"pairs": {"min_margin": 0.5}}))
    assert "unchanged" in said[0]
    assert "min_margin changed: 0.0 → 0.5" in said[1]
    assert other.stages["dataset"] != first.stages["dataset"]
    back, said = run(config_of(world))
    assert back.stages == first.stages
    assert "unchanged" in said[1]


def test_from_runs_again_once(world: Path) -> None:
    config = config_of(world)
    first = run(config)[0]
    again, said = run(config, RunRequest(until="dataset", redo_from="dataset"))
    assert "unchanged" in said[0]
    assert "asked for with --from" in said[1]
    assert again.stages["dataset"] != first.stages["dataset"]
    after, said = run(config)
    assert after.stages == again.stages
    assert all("unchanged" in line for line in said)


def test_deleted_result_is_made_again(world: Path) -> None:
    config = config_of(world)
    record = run(config)[0].record("dataset")
    assert record is not None
    content = record.path("file").read_bytes()
    record.path("file").unlink()
    again, said = run(config)
    assert "is missing" in said[1]
    assert again.record("dataset").path("file").read_bytes() == content  # type: ignore[union-attr]


def test_comparison_without_production_is_configurable(world: Path) -> None:
    start, why, incumbent = choose_models(config_of(world))
    assert (start, why) == (incumbent, "nothing is in production yet")
    gate = {"config": str(world / "gate.yaml"), "without_production": "skip"}
    assert choose_models(config_of(world, gate=gate))[2] is None


def groups_of(path: Path) -> list[tuple[object, list[tuple[object, float]]]]:
    def plain(group: TraceGroup) -> tuple[object, list[tuple[object, float]]]:
        return group.prompt, [(trace.response, trace.reward) for trace in group.traces]

    return [plain(group) for group in iter_trace_groups(str(path))]


def test_recorded_groups_survive_the_snapshot(world: Path) -> None:
    rows = tiny_runs.traces(5, 3)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    rows += [{"input": chat, "output": text, "final_reward": reward} for text, reward in (("x", 0.0), ("y", 1.0))]
    tiny_runs.write_rows(world / "traces.jsonl", rows)
    config = config_of(world, dataset={"kind": "groups"}, train={"algorithm": "grpo"})
    record = run(config)[0].record("dataset")
    assert record is not None
    assert groups_of(record.path("file")) == groups_of(world / "traces.jsonl")


def test_prompts_with_one_reference_become_tasks(world: Path) -> None:
    rows = [{**row, "reference": "7"} for row in tiny_runs.traces(4, 2)]
    rows += [{"input": "no answer?", "output": "x", "final_reward": 0.5}]
    rows += [{"input": "two answers?", "output": "x", "final_reward": 0.5, "reference": str(k)} for k in range(2)]
    tiny_runs.write_rows(world / "traces.jsonl", rows)
    config = config_of(world, dataset={"kind": "prompts"}, train={"algorithm": "grpo"})
    record = run(config)[0].record("dataset")
    assert record is not None
    left_out = json.loads((record.folder / "report.json").read_text())["left_out"]
    assert left_out == {"no reference answer": 1, "several reference answers": 1}
    entry = {"dataset_name": "ResponseDataset", "data_path": str(record.path("file"))}
    tasks = load_task_dataset(entry, {}, ChatFormat(build_tokenizer()), max_prompt_tokens=None, seed=0)
    assert len(tasks) == 4
    assert {task.reference for task in tasks} == {"7"}


def test_a_teacher_needs_no_references(world: Path) -> None:
    taught = {"algorithm": "distill", "overrides": [f"teacher.model_name={world / 'base'}"]}
    record = run(config_of(world, train=taught))[0].record("dataset")
    assert record is not None
    rows = [json.loads(line) for line in record.path("file").read_text().splitlines()]
    assert len(rows) == len({str(row["input"]) for row in rows}) > 0
    assert all("output" not in row for row in rows)
