"""The commands of the guides, as `examples/seeds/*.sh` has them: run with a tiny model and small sizes."""

from __future__ import annotations

import gzip
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from seed_features import check_script
from tiny_runs import Row, preferences, questions, rows_of, save_model, traces, write_rows

REPOSITORY = Path(__file__).parents[2]

GRPO_SIZES = (
    "policy.precision=float32 policy.num_threads=1 policy.max_total_sequence_length=48 "
    "policy.generation.max_new_tokens=8 "
    "env.math.num_workers=1"
)
STEP_SIZES = "grpo.num_prompts_per_step=4 grpo.num_generations_per_prompt=4 policy.train_global_batch_size=16"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), max_length=256)


@pytest.fixture(scope="module")
def run_script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Runs a script with these variables; returns its output, both streams."""
    preloaded = REPOSITORY / "tests" / "preloaded_python.py"
    place = str(tmp_path_factory.mktemp("python") / "socket")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(
        [sys.executable, str(preloaded), "serve", place], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    python = f"{sys.executable} -S {preloaded} run {place}"

    def run(name: str, **variables: object) -> str:
        given = {"PYTHON": python, "POSTTRAIN": f"{python} -m posttrain.cli.main"}
        given |= {key: str(value) for key, value in variables.items()}
        ended = subprocess.run(
            ["bash", str(REPOSITORY / "examples" / "seeds" / name)],
            env=environment | given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=400,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout[-8000:]
        return ended.stdout

    yield run
    server.terminate()
    server.wait()
    server.stdout.close()


RunScript = Callable[..., str]


def trained_steps(folder: Path) -> list[int]:
    return [row["step"] for row in rows_of(folder) if "train/loss" in row]


def test_training_job_from_labelled_traces(run_script: RunScript, model: Path, tmp_path: Path) -> None:
    kept = [{**row, "final_reward": 0.6 + 0.4 * row["final_reward"]} for row in traces(8, 4)]
    rejected = [{**row, "final_reward": 0.1} for row in traces(8, 1)]
    data = write_rows(tmp_path / "traces.jsonl", [*kept, *rejected])
    small = "policy.precision=float32 policy.num_threads=1 policy.max_total_sequence_length=64"
    sizes = f"{small} {STEP_SIZES} policy.generation.max_new_tokens=8 grpo.max_num_steps=2 data.validation=null"
    dpo_sizes = f"{small} policy.train_global_batch_size=4 dpo.max_num_steps=2"
    variables = {"MODEL": model, "DATA": data, "NUM_NODES": 1, "DEVICES": 1, "SIZES": sizes, "DPO_SIZES": dpo_sizes}
    said = run_script("000.sh", **variables, CHECKPOINTS=tmp_path)
    rows = rows_of(tmp_path / "grpo-run-001")
    assert [row["step"] for row in rows] == [1, 2]
    assert min(row["train/reward_min"] for row in rows) >= 0.5, "traces below the threshold are left out"
    assert trained_steps(tmp_path / "glm-5-dpo") == [1, 2]
    log = (tmp_path / "grpo-run-001" / "logs" / "train.log").read_text()
    assert "[Generate] 4 prompts x 4 generations = 16 responses, 16 of them recorded" in log
    assert "Starting validation" not in said, "there is no validation set"
    dpo = (tmp_path / "glm-5-dpo" / "logs" / "train.log").read_text()
    run_script("000.sh", **variables, CHECKPOINTS=tmp_path / "with_critic", VF_COEFF=0.5)
    ppo = tmp_path / "with_critic" / "grpo-run-001"
    assert all("train/value_loss" in row for row in rows_of(ppo))
    check_script("000", said + log + dpo + (ppo / "logs" / "train.log").read_text())


def test_lora_on_two_nodes_with_its_checks(run_script: RunScript, model: Path, tmp_path: Path) -> None:
    problems = [{"problem": row["input"], "expected_answer": row["output"]} for row in questions(16)]
    data = write_rows(tmp_path / "open_math.jsonl", problems)
    said = run_script(
        "001.sh",
        MODEL=model,
        CHECKPOINTS=tmp_path / "checkpoints",
        LOGS=tmp_path / "run",
        NUM_NODES=1,
        GPUS_PER_NODE=1,
        STEPS=2,
        PROMPTS=4,
        GENERATIONS=4,
        BATCH=16,
        SAVE_PERIOD=1,
        SIZES=f"{GRPO_SIZES} data.train.data_path={data} data.train.split_validation_size=4 grpo.val_period=2 "
        "logger.num_val_samples_to_print=1",
    )
    assert trained_steps(tmp_path / "run") == [1, 2]
    checks = said[said.rindex("report.html") :]
    for line in (
        "========================= Step 1/2 =========================",
        "========================= Step 2/2 =========================",
        "[Reward]   mean=",
        "step_1",
        "step_2",
    ):
        assert line in checks, "the guide's own checks find it"
    log = (tmp_path / "run" / "logs" / "train.log").read_text()
    check_script("001", said, log)
    said += log
    for line in (
        "▶ Preparing for logprob inference...",
        "▶ Preparing for training...",
        "  • logprob_inference_prep: ",
        "  • training_prep: ",
        "prepare_for_generation/total: ",
        "Saving tokenizer (or processor) to ",
        "  • checkpointing: ",
        "▶ Preparing batch...",
        "▶ Generating responses for batch of size 16...",
        "▶ Processing rewards...",
        "▶ Computing logprobs...",
        "▶ Computing advantages...",
        "▶ Training policy...",
        "▶ Starting validation at step 2...",
        "[Generate] 4 prompts x 4 generations = 16 responses (",
        "[Train]    loss=",
        "[Time]     total=",
        "prepare_for_generation/transfer_and_update_weights: ",
        "the sampler shares the trainer's weights",
        "  • data_processing: ",
        "Throughputs (per Group):",
        "Saving checkpoint for step 1...",
        "Saving checkpoint for step 2...",
        f"Logged data to {tmp_path / 'run'}/rollouts/step_2.jsonl.gz",
        "Sample 1 (",
        "  expected │ ",
        "Max number of steps has been reached (2)",
    ):
        assert line in said
    with gzip.open(tmp_path / "run" / "rollouts" / "step_2.jsonl.gz") as groups:
        assert len(groups.readlines()) == 4
    adapters = json.loads((tmp_path / "checkpoints/step_2/policy/weights/model/adapter_config.json").read_text())
    assert adapters["r"] == 8


def test_workflow_from_a_dataset_to_a_served_model(run_script: RunScript, model: Path, tmp_path: Path) -> None:
    problems = [{"question": row["input"], "answer": f"Add them.\n#### {row['output']}"} for row in questions(16)]
    data = write_rows(tmp_path / "gsm8k.jsonl", problems)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = run_script(
        "002.sh",
        MODEL=model,
        OUT=tmp_path / "run",
        STEPS=1,
        MORE_STEPS=2,
        PORT=port,
        SIZES=f"{GRPO_SIZES} {STEP_SIZES} data.train.data_path={data}",
        EVAL_SIZES=f"data.data_path={data} generation.vllm_cfg.max_model_len=48 generation.vllm_cfg.precision=float32 "
        f"eval.save_path={tmp_path / 'eval'}",
    )
    assert trained_steps(tmp_path / "run") == [1, 2]
    assert "after step 1" in said, "the second training continues the first"
    check_script("002", said)
    assert "metric=pass@1" in said
    assert "answer: {" in said


def aligner_pairs(count: int, seed: int) -> list[Row]:
    """In NeMo-Aligner's template and columns, with rewards for RPO."""
    return [
        {
            "prompt": f"<extra_id_0>System\n\n<extra_id_1>User\n{row['prompt']}\n<extra_id_1>Assistant\n",
            "chosen_response": f"{row['chosen']}\n<extra_id_1>",
            "rejected_response": f"{row['rejected']}\n<extra_id_1>",
            "chosen_reward": 1.5,
            "rejected_reward": 0.5,
        }
        for row in preferences(count, seed)
    ]


def test_dpo_with_the_names_of_nemo_aligner(run_script: RunScript, model: Path, tmp_path: Path) -> None:
    said = run_script(
        "003.sh",
        MODEL=model,
        TRAIN=write_rows(tmp_path / "train.jsonl", aligner_pairs(12, 0)),
        VALIDATION=write_rows(tmp_path / "val.jsonl", aligner_pairs(6, 1)),
        OUT=tmp_path,
        SEQ_LENGTH=128,
        DEVICES=1,
        PRECISION=32,
        STEPS=2,
        VAL_INTERVAL=2,
        SAVE_INTERVAL=2,
        BATCH=6,
        SIZES="policy.num_threads=1 policy.device=cpu",
    )
    runs = {name: rows_of(tmp_path / name) for name in ("rows", "packs", "lora")}
    first = {
        name: next(row["train/preference_loss"] for row in rows if row["step"] == 1) for name, rows in runs.items()
    }
    assert first["rows"] == pytest.approx(0.6931, abs=1e-3), "ln 2: the policy is the reference"
    assert first["packs"] == pytest.approx(0.6931, abs=1e-3)
    assert all([row["step"] for row in rows if "train/loss" in row] == [1, 2] for rows in runs.values())
    assert "Samples processed: 6" in said, "pairs count as pairs"
    assert "`model.dpo.ref_policy_kl_penalty` is now `dpo.reference_policy_kl_penalty`" in said
    assert (tmp_path / "hf" / "model.safetensors").is_file()
    check_script("003", said)


def test_llama_on_deepscaler_with_conversion_and_evaluation(run_script: RunScript, model: Path, tmp_path: Path) -> None:
    problems = [{"problem": row["input"], "answer": row["output"]} for row in questions(16)]
    data = write_rows(tmp_path / "problems.jsonl", problems)
    folder = tmp_path / "nemo_rl_llama3_8b_ds_cp"
    said = run_script(
        "004.sh",
        CHECKPOINTS=folder,
        NUM_NODES=1,
        GPUS_PER_NODE=1,
        STEPS=2,
        STEP=2,
        SIZES=f"{GRPO_SIZES} {STEP_SIZES} policy.model_name={model} data.train.data_path={data} "
        "data.train.split_validation_size=4 grpo.val_period=2 checkpointing.save_period=1 checkpointing.keep_top_k=1 "
        "loss_fn.reference_policy_kl_penalty=0.01 checkpointing.metric_name=null",
        AIME=data,
        MATH500=data,
        MAX_MODEL_LEN=48,
        SAMPLES=2,
        EVAL_GPUS=1,
        EVAL_SIZES="generation.vllm_cfg.precision=float32 data.prompt_file=null generation.vllm_cfg.max_model_len=48",
    )
    assert trained_steps(folder) == [1, 2]
    assert "wandb is not installed: pip install 'posttrain[wandb]'" in said, (
        "a logger without its client does not end a run"
    )
    for file in ("config.yaml", "training_info.json", "policy/tokenizer/tokenizer.json", "policy/weights/model"):
        assert f"{folder}/step_2/{file}" in said
    assert (folder / "hf" / "config.json").is_file()
    assert f"model_name='{folder}/hf' dataset_name='AIME2024'" in said
    assert f"model_name='{folder}/hf' dataset_name='math500'" in said
    assert "metric=pass@1 num_tests_per_prompt=2" in said
    check_script("004", said, (folder / "logs" / "train.log").read_text())
