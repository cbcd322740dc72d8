"""`posttrain plan`: what it prints, what it proposes, what it refuses, and how it compares."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.apps.plan.calibration import GPUS
from posttrain.apps.plan.measured import compare, read_measured
from posttrain.apps.plan.plan import RunEstimate, assumptions, estimate_run
from posttrain.apps.plan.proposal import explain, propose, remedies
from posttrain.cli.main import main
from posttrain.config import load_config
from posttrain.policy.memory.model_shape import NAMED_SHAPES
from posttrain.policy.memory.peak_memory import SAMPLING, SCORING, TRAINING

REPOSITORY = Path(__file__).parents[4]
STEP = [
    "policy.model_name=llama-8b",
    "grpo.num_prompts_per_step=64",
    "grpo.num_generations_per_prompt=32",
    "policy.train_global_batch_size=2048",
    "policy.max_total_sequence_length=900",
    "policy.generation.max_new_tokens=772",
    "policy.generation.ignore_eos=true",
]
SHORT_STATE = ["policy.optimizer.state_dtype=bfloat16", "policy.optimizer.master_weights=none"]


def planned(*words: str, kind: str = "grpo", gpu: str = "h200") -> RunEstimate:
    return estimate_run(load_config(kind, None, list(words)).config, GPUS[gpu])


# -- the command
# ---------------------------------------------------------------------------------------------------------


def test_planning_needs_neither_torch_nor_weights() -> None:
    script = (
        "import sys\nfrom posttrain.cli.main import main\ncode = main(sys.argv[1:])\n"
        "print('LOADED', *[name for name in ('torch', 'transformers') if name in sys.modules])\nsys.exit(code)\n"
    )
    words = ["plan", "grpo", *STEP, *SHORT_STATE]
    ended = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[-1] == "LOADED"
    for words_of_the_plan in (
        "GiB on each GPU",
        "optimizer state",
        "KV cache",
        "policy_training",
        "assumed",
        "measured (",
    ):
        assert words_of_the_plan in ended.stdout
    assert "not measured" not in ended.stdout


def test_json_holds_every_phase_and_stage_and_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            ["plan", "grpo", *STEP, *SHORT_STATE, "--json", "--gpu", "h100", "policy.dtensor_cfg.lora_cfg.enabled=true"]
        )
        == 0
    )
    plan = json.loads(capsys.readouterr().out)
    assert plan["gpu"] == "h100"
    assert not plan["gpu_is_measured"]
    assert set(plan["memory_gib"]) == {"sampling", "logprobs", "training", "optimizer"}
    for phase in plan["memory_gib"].values():
        assert phase["peak"] == pytest.approx(sum(phase["items"].values()))
        assert phase["needed"] > phase["peak"]
    seconds = plan["seconds"]
    stages = ("generation", "policy_and_reference_logprobs", "policy_training")
    assert seconds["total_step_time"] == pytest.approx(sum(seconds[stage] for stage in stages))
    assert any("not measured" in line for line in plan["assumptions"])


def test_plan_that_does_not_fit_exits_64_with_remedies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "grpo", *STEP]) == 64
    captured = capsys.readouterr()
    assert "optimizer state" in captured.out, "the table is printed all the same"
    assert "training: needs" in captured.err
    assert "largest: optimizer state 89.7" in captured.err
    assert "try policy.optimizer.state_dtype=bfloat16 policy.optimizer.master_weights=none: fits" in captured.err
    assert "try policy.dtensor_cfg.lora_cfg.enabled=true" in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "z80", "grpo"], "--gpu z80: not in the planner's table; accepted: h200, h100"),
        ([], "give the kind of run"),
        (["--config", str(REPOSITORY / "configs/eval.yaml")], "is the config of an evaluation"),
        (
            ["grpo", "policy.model_name=llama-8b", "--prompt-tokens", "600"],
            "do not fit policy.max_total_sequence_length = 512",
        ),
        (["grpo", "policy.model_name=nowhere"], "no folder 'nowhere'"),
        (["grpo", "--run", "/nonexistent/run", "policy.model_name=llama-8b"], "no such folder"),
        (["grpo", "--run", "/", "policy.model_name=llama-8b"], "no config.yaml there"),
        (["grop"], "unknown run type 'grop': give the kind"),
        (
            ["--gpu", "a100-80gb", "grpo", "policy.model_name=llama-1.5b", "policy.fp8=true"],
            "policy.fp8 = true: a100-80gb has no FP8 matrix units",
        ),
        (
            ["--gpu", "a100-40gb", "grpo", "policy.model_name=qwen-0.5b", "policy.generation.native_cfg.precision=fp8"],
            "native_cfg.precision = fp8: a100-40gb has no FP8 matrix units",
        ),
    ],
)
def test_bad_input_is_64_with_a_message(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 64
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["grpo", "dpo", "rm", "sft"])
@pytest.mark.parametrize("model", ["qwen-0.5b", "llama-1.5b"])
def test_every_algorithm_has_a_plan(kind: str, model: str) -> None:
    found = planned(f"policy.model_name={model}", kind=kind)
    assert found.time.total_s > 0
    assert (found.time.generation_s > 0) == (kind == "grpo")
    assert (found.time.logprobs_s > 0) == (kind in ("grpo", "dpo"))
    names = {phase.name for phase in found.memory.phases}
    assert (SAMPLING in names, SCORING in names) == (kind == "grpo", kind in ("grpo", "dpo"))


def test_kto_scores_answers_beside_other_prompts_too() -> None:
    kto = ["policy.model_name=llama-1.5b", "dpo.preference_loss=kto"]
    assert planned(*kto, kind="dpo").workload.num_scorings == 3
    assert planned("policy.model_name=llama-1.5b", kind="dpo").workload.num_scorings == 1


def test_uncounted_parts_are_listed() -> None:
    words = [
        "policy.model_name=llama-1.5b",
        "grpo.use_dynamic_sampling=true",
        "loss_fn.reference_policy_kl_penalty=0",
        "policy.dtensor_cfg.lora_cfg.enabled=true",
        "policy.dtensor_cfg.lora_cfg.exclude_modules=[down_proj]",
        "policy.fp8=true",
    ]
    config = load_config("grpo", None, words).config
    said = "\n".join(assumptions(estimate_run(config, GPUS["h200"]), config))
    assert "adapters are counted on every linear layer" in said
    assert "dynamic sampling is counted as one batch" in said
    assert "every answer is counted in training" in said
    assert "policy.fp8: products of the layers are 2 times as fast as in bf16" in said


def test_the_copy_of_a_checkpoint_takes_host_memory() -> None:
    words = ["policy.model_name=llama-1.5b", "checkpointing.enabled=true"]
    assert planned(*words).memory.host_items.keys() == {"copy of a checkpoint"}
    assert not planned(*words, "checkpointing.async_save=false").memory.host_items


def test_a_reward_model_has_no_logits() -> None:
    phase = next(p for p in planned("policy.model_name=llama-1.5b", kind="rm").memory.phases if p.name == TRAINING)
    assert not phase.items.get("logits chunk")


def test_a_reward_model_has_no_output_table() -> None:
    phase = next(p for p in planned("policy.model_name=llama-8b", kind="rm").memory.phases if p.name == TRAINING)
    shape = NAMED_SHAPES["llama-8b"]
    assert phase.items["weights"] == 2 * (shape.num_weights - shape.vocab * shape.hidden)


# -- proposals and remedies
# ----------------------------------------------------------------------------------------------


def test_a_proposal_fits_and_is_no_slower() -> None:
    found = planned(*STEP, *SHORT_STATE, "policy.generation.native_cfg.max_batch_size=32")
    proposal = propose(found)
    assert proposal is not None
    assert not proposal.found.too_large
    assert proposal.found.time.total_s < 0.7 * found.time.total_s
    assert int(proposal.settings["policy.generation.native_cfg.max_batch_size"]) >= 256
    again = planned(*STEP, *SHORT_STATE, *[f"{name}={value}" for name, value in proposal.settings.items()])
    assert again.time.total_s == pytest.approx(proposal.found.time.total_s), (
        "typed into a config it is what was promised"
    )
    best = propose(again)
    assert best is not None
    assert not best.settings, "nothing more to say"


def test_a_proposal_names_the_section_whose_budget_holds() -> None:
    words = [
        *STEP,
        *SHORT_STATE,
        "policy.dynamic_batching.enabled=true",
        "policy.dynamic_batching.train_mb_tokens=1024",
    ]
    proposal = propose(planned(*words))
    assert proposal is not None
    again = planned(*words, *[f"{name}={value}" for name, value in proposal.settings.items()])
    assert again.time.total_s == pytest.approx(proposal.found.time.total_s)
    tight = planned(*STEP, "policy.dynamic_batching.enabled=true", "policy.dynamic_batching.train_mb_tokens=65536")
    assert not any("sequence_packing" in remedy.words for remedy in remedies(tight))


def test_activations_are_recomputed_only_if_needed() -> None:
    long = [*SHORT_STATE, "policy.model_name=llama-8b", "policy.max_total_sequence_length=32768"]
    roomy, tight = planned(*STEP, *SHORT_STATE), planned(*long, "policy.sequence_packing.train_mb_tokens=32768")
    proposals = [propose(found) for found in (roomy, tight)]
    assert [p and p.found.settings.checkpointing for p in proposals] == [False, True]


@pytest.mark.parametrize(
    "change", [STEP, [*STEP, "policy.optimizer.kwargs.fused=true", "loss_fn.reference_policy_kl_penalty=0"]]
)
def test_remedies_are_enough(change: list[str]) -> None:
    found = planned(*change)
    assert found.too_large
    tried = remedies(found)
    assert tried
    assert all(remedy.is_enough for remedy in tried)


def test_remedies_are_combined_if_one_is_not_enough() -> None:
    found = planned(*STEP, "policy.sequence_packing.train_mb_tokens=65536", gpu="a100-80gb")
    words = [remedy.words for remedy in remedies(found) if remedy.is_enough]
    assert len(words) == 1
    assert words[0].count("policy.") >= 2
    assert "fits" in explain(found)


def test_plan_without_remedy_is_reported() -> None:
    found = planned("policy.model_name=llama-8b", *SHORT_STATE)
    tiny = replace(GPUS["l40s"], memory_bytes=2**30)
    hopeless = replace(found, gpu=tiny)
    assert "still" in explain(hopeless) or "no setting" in explain(hopeless)


@pytest.mark.parametrize(("tokens", "recomputes"), [(8192, False), (65536, True)])
def test_auto_decides_by_what_fits(tokens: int, recomputes: bool) -> None:
    words = [*STEP, *SHORT_STATE, "policy.dtensor_cfg.activation_checkpointing=auto"]
    found = planned(*words, f"policy.sequence_packing.train_mb_tokens={tokens}")
    assert found.settings.checkpointing is recomputes


# -- beside a run
# --------------------------------------------------------------------------------------------------------


def run_folder(folder: Path, rows: list[dict[str, Any]], *words: str) -> Path:
    (folder / "config.yaml").write_text(load_config("grpo", None, list(words)).to_yaml())
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def row_of(step: int, found: RunEstimate, factor: float) -> dict[str, Any]:
    stages = {f"timing/train/{name}": seconds * factor for name, seconds in found.time.stages.items()}
    return {
        "step": step,
        **stages,
        "timing/train/total_step_time": found.time.total_s * factor,
        "timing/train/reward_calculation": 1.0,
        "performance/mean_total_tokens_per_sample": 900.0,
        "performance/tokens_per_sec_per_gpu": found.tokens_per_s / factor,
        "train/mean_generation_length": 772.0,
        "performance/peak_gib_training_max": found.memory.peak_bytes(TRAINING) / 2**30 * factor,
        "performance/peak_gib_sampling_max": found.memory.peak_bytes(SAMPLING) / 2**30 * factor,
    }


def test_a_run_is_compared_stage_by_stage_without_its_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(*STEP, *SHORT_STATE)
    rows = [row_of(1, found, 9.0), *[row_of(step, found, factor) for step, factor in ((2, 1.0), (3, 1.25), (4, 1.5))]]
    folder = run_folder(tmp_path, rows, *STEP, *SHORT_STATE)
    measured = read_measured(folder)
    assert measured.num_steps == 3
    assert measured.lengths is not None
    assert (measured.lengths.prompt, measured.lengths.answer) == (128.0, 772.0)
    errors = {row.what: row.error for row in compare(found, measured)}
    assert errors["generation"] == pytest.approx(1 / 1.25 - 1)
    assert errors["these stages together"] == pytest.approx(1 / 1.25 - 1)
    assert errors["tokens per second and GPU"] == pytest.approx(0.25)
    assert errors["peak memory, training"] == pytest.approx(1 / 1.25 - 1)
    assert main(["plan", "--run", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "predicted and measured (median of 3 steps)" in out
    assert "-20.0%" in out
    assert main(["plan", "--run", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measured"]["num_steps"] == 3


def test_given_lengths_take_precedence_over_those_of_the_run(tmp_path: Path) -> None:
    row = {"step": 1, "timing/train/total_step_time": 1.0, "performance/mean_total_tokens_per_sample": 300.0}
    folder = run_folder(tmp_path, [{**row, "train/mean_generation_length": 200.0}], *STEP)
    config = load_config("grpo", folder / "config.yaml", []).config
    measured = read_measured(folder).lengths
    assert estimate_run(config, GPUS["h200"], lengths=measured).workload.lengths.prompt == 100.0
    given = estimate_run(config, GPUS["h200"], lengths=measured, answer_tokens=50)
    assert (given.workload.lengths.prompt, given.workload.lengths.answer) == (100.0, 50)


def test_folder_without_steps_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folder(tmp_path, [], *STEP)
    assert main(["plan", "--run", str(folder)]) == 64
    assert "has no training step yet" in capsys.readouterr().err


def test_run_on_a_cpu_is_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(*STEP, *SHORT_STATE)
    folder = run_folder(tmp_path, [row_of(1, found, 1.0)], *STEP, *SHORT_STATE)
    (folder / "run.json").write_text(json.dumps({"device_word": "device"}))
    assert main(["plan", "--run", str(folder)]) == 0
    assert "was made on a CPU" in capsys.readouterr().err


# -- cost
# ----------------------------------------------------------------------------------------------------------------


def test_price_of_a_gpu_gives_the_cost_of_step_and_run(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "grpo", *STEP, *SHORT_STATE, "grpo.max_num_steps=100", "cluster.gpus_per_node=8"]
    assert main([*words, "--gpu-hour-price", "2.5", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    per_step = 8 * 2.5 * plan["seconds"]["total_step_time"] / 3600
    assert plan["cost"]["per_step"] == pytest.approx(per_step)
    assert plan["cost"]["in_all"] == pytest.approx(100 * per_step)
    assert main([*words, "--gpu-hour-price", "2.5"]) == 0
    said = capsys.readouterr().out
    assert "on 8 GPUs at 2.5 an hour each" in said
    assert f"{100 * per_step:,.2f} for 100 steps" in said


def test_cost_of_a_run_without_a_limit_of_steps_is_not_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "grpo", *STEP, *SHORT_STATE, "--gpu-hour-price", "2.5"]) == 0
    assert "for 1,000 steps; how many a run has depends on the data" in capsys.readouterr().out


@pytest.mark.parametrize("price", ["0", "-1", "nan", "inf", "cheap"])
def test_price_that_is_none_is_refused(price: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "grpo", f"--gpu-hour-price={price}"])
    assert ended.value.code == 64
    assert "more than 0" in capsys.readouterr().err
