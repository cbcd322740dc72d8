"""Vision-language models through whole runs on images: GRPO, resume, DPO, SFT, LoRA, conversion, serving."""

from __future__ import annotations

import base64
import json
import math
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from string import ascii_letters
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import LORA, assert_resumes, dpo, evaluation, grpo, rows_of, run, save_image_data, sft
from tiny_server import options_for, running
from tiny_server import save_model as save_language_model
from tiny_vision import (
    VISION_FAMILIES,
    engine_of,
    image_ref,
    make_chat,
    make_task,
    picture,
    save_vision_model,
    vision_inputs,
)
from transformers import AutoModelForImageTextToText

from posttrain.apps.evaluate.results import read_evaluation
from posttrain.apps.serve.options import ChatOptions
from posttrain.apps.serve.terminal import open_chat, run_command
from posttrain.cli.main import main
from posttrain.models.loading import load_model
from posttrain.types import ImageRef, NoiseKey, Sampling

LENGTHS = ["policy.max_total_sequence_length=128", "policy.logprob_batch_size=16"]
SHORT = [*LENGTHS, "policy.generation.max_new_tokens=8", "grpo.val_period=0", "checkpointing.metric_name=null"]


@pytest.fixture(scope="module", params=VISION_FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_image_data(tmp_path_factory.mktemp("data"))


def grpo_command(model: Path, data: Path, folder: Path) -> list[str]:
    return [*grpo(model, data, folder, steps=2), *SHORT, "checkpointing.save_period=1"]


def weights(run_folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run_folder / f"step_{step}" / "policy" / "weights" / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def trained(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grpo")
    assert run(grpo_command(model, data, folder)) == 0
    return folder


@pytest.mark.invariant
def test_grpo_on_images_trains_the_language_model_and_leaves_the_tower(model: Path, trained: Path) -> None:
    steps = rows_of(trained)
    assert [row["step"] for row in steps] == [1, 2]
    assert all(row["train/grad_norm"] > 0 for row in steps)
    assert all(row["train/token_mult_prob_error"] <= 1.000001 for row in steps)
    before, after = load_file(model / "model.safetensors"), weights(trained, 2)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    towers = set(filter(is_of_tower, before))
    assert changed
    assert towers
    assert not changed & towers


def test_a_resumed_run_on_images_has_the_same_bits(model: Path, data: Path, trained: Path, tmp_path: Path) -> None:
    assert_resumes(lambda folder: grpo_command(model, data, folder), trained, tmp_path / "resumed", 2)


@pytest.mark.full
def test_asynchronous_rounds_on_images(model: Path, data: Path, trained: Path, tmp_path: Path) -> None:
    """Without an age they are the synchronous run; with one, answers to images are carried over, and resume exactly."""

    def rounds(folder: Path, age: int, *extra: str) -> list[str]:
        asynchronous = ["grpo.async_grpo.enabled=true", f"grpo.async_grpo.max_trajectory_age_steps={age}"]
        return [*grpo_command(model, data, folder), *asynchronous, *extra]

    assert run(rounds(tmp_path / "same", 0)) == 0
    expected = weights(trained, 2)
    assert all(torch.equal(expected[name], found) for name, found in weights(tmp_path / "same", 2).items())
    aged = ["grpo.max_num_steps=4", "policy.generation.max_new_tokens=24"]
    assert run(rounds(tmp_path / "aged", 2, *aged)) == 0
    assert max(steps_of(tmp_path / "aged", "train/trajectory_age_max")) > 0
    assert_resumes(lambda folder: rounds(folder, 2, *aged), tmp_path / "aged", tmp_path / "resumed", 4)


AGAIN = """
from posttrain.environments.turns import ToolEnvironment, Turn


class Again(ToolEnvironment):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]

    def reset(self, task):
        return 0

    def call(self, state, name, arguments): ...

    def step(self, state, response):
        reward = sum(ord(c) % 2 for c in response) / max(1, len(response))
        return Turn(state + 1, f"again {state}", reward=reward, done=state == 2)
"""


def in_turns(model: Path, data: Path, folder: Path, environment: str) -> list[str]:
    folder.mkdir()
    (folder / "again.py").write_text(environment)
    words = [word for word in grpo_command(model, data, folder / "run") if not word.startswith("env.mine")]
    turns = [f"env.mine={{turns: {folder / 'again.py:Again'}}}", "grpo.max_rollout_turns=3"]
    # A turn that is cut off is the last one: most of these end at a letter.
    lengths = ["policy.max_total_sequence_length=480", "policy.generation.max_new_tokens=24"]
    return [*words, *turns, *lengths, f"policy.generation.stop_strings={[*ascii_letters]}"]


def test_an_observation_with_the_token_of_an_image_leaves_its_answer_unscored(data: Path, tmp_path: Path) -> None:
    odd = AGAIN.replace('f"again {state}"', "f'again {\"<image>\" * (len(response) % 2)}'")
    model = save_vision_model(tmp_path / "model", "smolvlm")
    assert run(in_turns(model, data, tmp_path / "odd", odd)) == 0
    assert any(0 < row["train/unscored"] < 16 for row in rows_of(tmp_path / "odd" / "run"))


@pytest.mark.full
def test_conversations_about_images(model: Path, data: Path, tmp_path: Path) -> None:
    """Several turns after a prompt with images: each token is computed once, and is the trainer's."""
    assert run(in_turns(model, data, tmp_path / "turns", AGAIN)) == 0
    for row in rows_of(tmp_path / "turns" / "run"):
        assert row["train/turns"] > 1.5
        assert row["train/unscored"] == 0
        assert row["train/token_mult_prob_error"] <= 1.000001
        assert row["train/prefill_tokens_reused"] > row["train/prefill_tokens_computed"]


@pytest.mark.full
def test_distillation_on_images(model: Path, data: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    teacher = save_vision_model(tmp_path / "teacher", request.node.callspec.params["model"], seed=1)
    divergences = []
    for name, place in (("seen", data), ("unseen", other_images(tmp_path / "other"))):
        assert run(["distill", *grpo_command(model, place, tmp_path / name)[1:], f"teacher={teacher}"]) == 0
        divergences.append(steps_of(tmp_path / name, "train/divergence"))
    seen, other = divergences
    assert len(seen) == 2
    assert seen[1] < seen[0]
    assert seen[0] != other[0]


def command_of(make: Callable[..., list[str]], kind: str, model: Path, data: Path, folder: Path) -> list[str]:
    extra = [f"{kind}.val_period=0", "checkpointing.metric_name=null", "checkpointing.save_period=2"]
    return [*make(model, data, folder, steps=2), *LENGTHS, *extra]


def other_images(folder: Path) -> Path:
    """The same rows about other images of the same sizes."""
    folder.mkdir()
    save_image_data(folder)
    for index in range(8):
        picture(8 + 8 * (index % 3), 8 + 4 * (index % 4), 100 + index).save(folder / f"{index}.png")
    return folder


def test_dpo_starts_at_the_reference_and_depends_on_the_images(model: Path, data: Path, tmp_path: Path) -> None:
    assert run(command_of(dpo, "dpo", model, data, tmp_path / "dpo")) == 0
    losses = steps_of(tmp_path / "dpo", "train/loss")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)
    assert run(command_of(dpo, "dpo", model, other_images(tmp_path / "other"), tmp_path / "other_dpo")) == 0
    assert steps_of(tmp_path / "other_dpo", "train/loss")[1] != losses[1]


def test_the_loss_of_sft_depends_on_the_images(model: Path, data: Path, tmp_path: Path) -> None:
    assert run(command_of(sft, "sft", model, data, tmp_path / "sft")) == 0
    assert run(command_of(sft, "sft", model, other_images(tmp_path / "other"), tmp_path / "other_sft")) == 0
    first, second = (steps_of(tmp_path / name, "train/loss") for name in ("sft", "other_sft"))
    assert all(abs(one - other) > 1e-3 for one, other in zip(first, second, strict=True))


def steps_of(folder: Path, name: str) -> list[float]:
    return [row[name] for row in rows_of(folder) if name in row]


@pytest.mark.parametrize("lora", [False, True], ids=["in full", "by adapters"])
def test_the_tower_trains_where_asked(model: Path, data: Path, tmp_path: Path, lora: bool) -> None:
    command = [*grpo_command(model, data, tmp_path / "run"), "policy.vision.train_tower=true"]
    assert run([*command, *(LORA if lora else [])]) == 0
    assert all(gap <= 1.000001 for gap in steps_of(tmp_path / "run", "train/token_mult_prob_error"))
    if lora:
        folder = tmp_path / "run" / "step_2" / "policy" / "weights" / "model"
        adapters = load_file(folder / "adapter_model.safetensors")
        grown = [name for name, values in adapters.items() if is_of_tower(name) and "lora_B" in name and values.any()]
        assert grown
    else:
        before, after = load_file(model / "model.safetensors"), weights(tmp_path / "run", 2)
        assert any(not torch.equal(before[name], after[name]) for name in before if is_of_tower(name))


def is_of_tower(name: str) -> bool:
    return any(part in name for part in ("vision", "visual", "connector", "projector"))


def test_adapters_leave_the_tower_alone_and_are_merged(model: Path, data: Path, tmp_path: Path) -> None:
    assert run([*grpo_command(model, data, tmp_path / "run"), *LORA]) == 0
    adapters = load_file(tmp_path / "run" / "step_2" / "policy" / "weights" / "model" / "adapter_model.safetensors")
    assert adapters
    assert not any(map(is_of_tower, adapters))
    assert main(["convert", str(tmp_path / "run"), "--to", str(tmp_path / "hf"), "--merge-lora"]) == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "hf"))
    assert {name for name in before if not torch.equal(before[name], after[name])}
    assert all(torch.equal(before[name], after[name]) for name in before if is_of_tower(name))


def test_a_converted_model_sees_with_transformers_as_the_checkpoint_does(trained: Path, tmp_path: Path) -> None:
    """With the processor's files, and as plain transformers loads it."""
    assert main(["convert", str(trained), "--to", str(tmp_path / "hf")]) == 0
    chat, model = make_chat(tmp_path / "hf"), load_model(str(tmp_path / "hf"), torch.float32, torch.device("cpu"))
    task = make_task(chat, 0, [image_ref(24, 16, 1)], "?")
    [[answer]] = engine_of(model, tmp_path / "hf").generate([task], 1, Sampling(8, temperature=0.0), NoiseKey(0, 0))
    own = AutoModelForImageTextToText.from_pretrained(tmp_path / "hf").eval()
    ids = torch.tensor([task.prompt_ids])
    inputs = vision_inputs(tmp_path / "hf", task, ids)
    whole = own.generate(ids, **inputs, max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(ids))
    assert list(answer.token_ids) == whole[0, ids.shape[1] :].tolist()


def post(url: str, content: list[dict[str, Any]], role: str = "user") -> dict[str, Any]:
    messages = [{"role": role, "content": content}]
    body = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 8, "return_token_ids": True}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        return json.load(urllib.request.urlopen(request, timeout=60))  # type: ignore[no-any-return]
    except urllib.error.HTTPError as error:
        return json.load(error)["error"]  # type: ignore[no-any-return]


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def data_url(image: ImageRef) -> str:
    return "data:image/png;base64," + base64.b64encode(image.data).decode()


def test_a_server_sees_images_of_data_urls(model: Path) -> None:
    engine = engine_of(load_model(str(model), torch.float32, torch.device("cpu")), model)
    by_answer: dict[tuple[int, ...], ImageRef] = {}  # two images that are answered in different ways
    for seed in range(1, 20):
        task = make_task(make_chat(model), 0, [image_ref(24, 16, seed)], "?")
        [[one]] = engine.generate([task], 1, Sampling(8, temperature=0.0), NoiseKey(0, 0))
        by_answer.setdefault(one.token_ids, task.images[0])
        if len(by_answer) == 2:
            break
    (expected, images) = zip(*by_answer.items(), strict=True)
    assert len(images) == 2
    text = [{"type": "text", "text": word} for word in ("See ", "?")]
    with running(options_for(model)) as server:
        for _ in range(2):  # the second time from cached prefixes
            for image, ids in zip(images, expected, strict=True):
                answer = post(server.url, [text[0], image_part(data_url(image)), text[1]])
                assert tuple(answer["choices"][0]["token_ids"]) == ids
        for url, reason in (
            ("http://127.0.0.1/a.png", "only data: URLs are read"),
            ("data:image/png;base64,AAAA", "image"),
            ("data:image/png;base64,?", "base64"),
        ):
            refused = post(server.url, [image_part(url)])
            assert refused["param"] == "messages.0.content.0.image_url.url"
            assert reason in refused["message"]
        refused = post(server.url, [image_part(data_url(images[0]))], role="system")
        assert refused["param"] == "messages.0.content"
        refused = post(server.url, [{"type": "input_audio", "input_audio": {}}])
        assert refused["param"].startswith("messages.0.content.0")


def test_a_server_of_a_language_model_refuses_images(tmp_path: Path) -> None:
    with running(options_for(save_language_model(tmp_path))) as server:
        refused = post(server.url, [image_part(data_url(image_ref(8, 8)))])
    assert refused["param"] == "messages"
    assert "reads text only" in refused["message"]


def test_a_chat_shows_the_model_an_image(model: Path, tmp_path: Path) -> None:
    picture(24, 16, 1).save(tmp_path / "one.png")
    (tmp_path / "none.png").write_text("no image")
    options = ChatOptions(device="cpu", precision="float32", temperature=0.0, max_tokens=8, max_model_len=256)
    chat, said = open_chat(str(model), options), list[str]()
    for line in (f"/image {tmp_path / 'none.png'}", "/image nowhere.png", f"/image {tmp_path / 'one.png'}"):
        assert run_command(chat, line, said.append)
    assert "none.png" in said[0] or "image" in said[0]
    assert "nowhere.png" in said[1]
    assert said[2] == "(an image of 24 x 16 pixels goes with the next message)\n"
    answer = "".join(chat.answer("?"))
    run_command(chat, "/history", said.append)
    assert said[3] == f"user: [image] ?\nassistant: {answer}\n"
    task = make_task(make_chat(model), 0, [image_ref(24, 16, 1)], "?", before="")
    engine = engine_of(load_model(str(model), torch.float32, torch.device("cpu")), model)
    [[one]] = engine.generate([task], 1, Sampling(8, temperature=0.0), NoiseKey(0, 0))
    assert answer == one.text
    assert "".join(chat.answer("and now?"))  # the image is still in the conversation


def test_an_evaluation_asks_about_images(model: Path, data: Path, tmp_path: Path) -> None:
    answers = []
    for name, place in (("seen", data), ("other", other_images(tmp_path / "other_images"))):
        settings = ["generation.vllm_cfg.max_model_len=128", f"env.mine.function={data / 'rewards.py:odd'}"]
        keys = ["data.problem_key=input", "data.solution_key=output", "generation.temperature=0"]
        assert main([*evaluation(model, place / "questions.jsonl", tmp_path / name, *settings), *keys]) == 0
        answers.append([[one.text for one in problem.samples] for problem in read_evaluation(tmp_path / name).problems])
    assert answers[0] != answers[1]
