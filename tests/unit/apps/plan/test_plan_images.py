"""What the planner counts of images: the tower, what it keeps of an image, and the time of its passes."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_vision import VISION_FAMILIES, image_ref, make_chat, make_task, save_vision_model, tiny_vision_model
from torch import Tensor
from transformers import AutoConfig

from posttrain.apps.plan.calibration import GPUS
from posttrain.apps.plan.plan import RunEstimate, assumptions, estimate, estimate_run
from posttrain.config import LoraConfig, load_config
from posttrain.models.loading import beside_text, load_model
from posttrain.models.lora import add_lora
from posttrain.models.vision import tower_of
from posttrain.policy.memory.model_shape import find_shape
from posttrain.policy.memory.peak_memory import FEATURE_BYTES, should_checkpoint

TRAINED, LORA = "policy.vision.train_tower=true", "policy.dtensor_cfg.lora_cfg={enabled: true, dim: 4}"


def plan(folder: Path, *words: str, kind: str = "grpo") -> RunEstimate:
    length = ["policy.max_total_sequence_length=256", "policy.precision=float32"]
    config = load_config(kind, None, [f"policy.model_name={folder}", *length, *words]).config
    found = estimate_run(config, GPUS["h200"], prompt_tokens=64)
    assert any("each prompt is counted as one image" in line for line in assumptions(found, config))
    return found


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_weights_are_those_of_the_whole_model_and_of_what_is_trained(family: str, tmp_path: Path) -> None:
    folder = save_vision_model(tmp_path, family)
    with torch.device("meta"):
        model = type(tiny_vision_model(family))(tiny_vision_model(family).config)
    tower = sum(parameter.numel() for parameter in beside_text(model).values())
    found = plan(folder)
    assert found.rank.weights == sum(one.numel() * one.element_size() for one in model.parameters())
    assert found.rank.num_trained == model.num_parameters() - tower
    assert plan(folder, TRAINED).rank.num_trained == model.num_parameters()
    adapted = add_lora(tiny_vision_model(family), LoraConfig(enabled=True, dim=4), 0, adapts_tower=True)
    adapters = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    assert plan(folder, TRAINED, LORA).rank.num_trained == adapters


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_an_image_has_the_patches_of_its_tokens_and_keeps_what_is_counted(family: str, tmp_path: Path) -> None:
    model = load_model(str(save_vision_model(tmp_path, family)), torch.float32, torch.device("cpu"), trains_tower=True)
    tower, shape, image = tower_of(model), find_shape(str(tmp_path)).tower, image_ref(48, 48)
    assert tower is not None
    chat = make_chat(tmp_path)
    tokens = make_task(chat, 0, [image], "?").prompt_ids.count(tower.tokens.token_id)
    pixels = tower.tokens.pixels(image)["pixel_values"]
    assert shape.patches_per_token * tokens == (len(pixels) if pixels.dim() == 2 else pixels.numel() / 3 / 4**2)
    kept: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        tower._embed(image, torch.device("cpu"))
    measured = sum(size for place, size in kept.items() if place not in weights)
    assert 0.75 < 4 * shape.kept_numbers(tokens) / measured < 1.5


def test_a_frozen_tower_computes_an_image_once_and_a_trained_one_in_every_pass(tmp_path: Path) -> None:
    folder = save_vision_model(tmp_path)
    found, trained, sft = plan(folder), plan(folder, TRAINED), plan(folder, kind="sft")
    assert found.shape.counted is not None
    no_images = replace(found.shape.tower, patches_per_token=0)
    blind = replace(found.shape, counted=replace(found.shape.counted, tower=no_images))

    def extra(one: RunEstimate) -> list[float]:
        before = estimate(blind, one.settings, one.workload, one.gpu).time
        return [one.time.prompts_s - before.prompts_s, one.time.logprobs_s - before.logprobs_s,
                one.time.passes_s - before.passes_s]  # fmt: skip

    first, scored, passes = extra(found)
    assert first > 0
    assert scored == passes == 0
    ratio = [part / first for part in extra(trained)]
    assert ratio == pytest.approx([1, trained.workload.num_scorings, 3])
    assert [part > 0 for part in extra(sft)] == [False, False, True]
    assert found.memory.host_items["features of images"] == FEATURE_BYTES
    assert "features of images" not in trained.memory.host_items
    [training] = [phase for phase in trained.memory.phases if phase.name == "training"]
    assert training.items["activations of the tower"] > 0


def test_the_choice_of_checkpointing_knows_the_tower(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(save_vision_model(tmp_path)).to_dict()
    words = ["policy.precision=float32", "policy.max_total_sequence_length=64"]
    words += ["policy.sequence_packing={enabled: true, train_mb_tokens: 64, logprob_mb_tokens: 64}"]

    def least_bytes(*more: str) -> int:
        """Memory in which activations are kept."""
        policy = load_config("sft", None, [*words, *more]).config.policy
        sizes = range(2**30, 2**30 + 2**27, 2**14)
        given = {"has_reference": False, "ranks": 1}
        return bisect_left(sizes, 1, key=lambda size: not should_checkpoint(config, policy, memory_bytes=size, **given))

    tower = find_shape(str(tmp_path)).tower
    assert 2**14 * (least_bytes(TRAINED) - least_bytes()) > 12 * tower.num_weights + 4 * tower.kept_numbers(64)
