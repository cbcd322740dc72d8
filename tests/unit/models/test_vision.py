"""Placeholders, positions and pixels of images, against the processors and models of transformers."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_vision import VISION_FAMILIES, image_ref, save_vision_model, tiny_vision_model, vision_tokenizer

from posttrain.data.chat import ChatFormat
from posttrain.data.datasets import load_task_dataset
from posttrain.data.errors import DataError
from posttrain.errors import InputError
from posttrain.models import vision
from posttrain.models.loading import expand_images_for, load_model, load_tokenizer
from posttrain.models.vision import ImageEmbeddings, ImageTokens, KeptEmbeddings, RowImages, VisionTower, tower_of
from posttrain.types import ImageRef

SIZES = [(7, 7), (8, 31), (33, 16), (40, 40), (90, 12), (17, 170), (64, 200), (16, 16), (31, 33)]
CPU = torch.device("cpu")


def tokens_of(family: str, folder: Path) -> ImageTokens:
    model = load_model(str(save_vision_model(folder, family)), torch.float32, CPU)
    tower = tower_of(model)
    assert tower is not None
    return tower.tokens


@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen3-vl"])
def test_as_many_placeholders_as_the_processor_makes_patches(family: str, tmp_path: Path) -> None:
    tokens = tokens_of(family, tmp_path)
    for size in SIZES:
        image = image_ref(*size)
        [[_, rows, columns]] = tokens.pixels(image)["image_grid_thw"].tolist()
        assert tokens.num_tokens(image) == rows * columns // 4
        assert tokens.text_of(image, "<|image_pad|>") == "<|image_pad|>" * (rows * columns // 4)


@pytest.mark.parametrize("family", ["smolvlm", "idefics3"])
def test_tiles_are_written_as_the_processor_of_transformers_does(family: str, tmp_path: Path) -> None:
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    from posttrain.data.images import open_image

    tokens = tokens_of(family, tmp_path)
    for size in SIZES:
        image = image_ref(*size)
        made = tokens.processor(images=[[open_image(image)]], return_row_col_info=True)
        [[rows]], [[columns]] = made["rows"], made["cols"]
        expected = get_image_prompt_string(
            rows, columns, 4, fake_token_around_image="<fake_token_around_image>", image_token="<image>",
            global_image_token="<global-img>",
        )  # fmt: skip
        assert tokens.text_of(image, "<image>") == expected
        assert tokens.num_tokens(image) == expected.count("<image>")


@pytest.mark.parametrize("family", ["qwen2-vl", "qwen2.5-vl", "qwen3-vl"])
def test_positions_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    tokens, model = tokens_of(family, tmp_path), tiny_vision_model(family)
    tokenizer = vision_tokenizer(family)
    for first, second in itertools.pairwise(SIZES):
        images = [image_ref(*first), image_ref(*second)]
        text = tokens.expanded(tokenizer, "<|image_pad|>a<|vision_start|><|image_pad|>bcd", images)
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        seen = tokens.layout(ids[0], images)
        grids = torch.cat([tokens.pixels(image)["image_grid_thw"] for image in images])
        expected, offset = model.model.get_rope_index(
            ids, mm_token_type_ids=(ids == tokens.token_id).int(), image_grid_thw=grids
        )
        assert torch.equal(seen.positions, expected[:, 0])
        assert seen.offset == int(offset)
        assert len(seen.key_ids) == ids.shape[1]


def test_a_text_with_the_token_of_an_image_is_refused(tmp_path: Path) -> None:
    tokens = tokens_of("qwen2.5-vl", tmp_path)
    with pytest.raises(DataError, match=r"1 images, and the rendered prompt holds '<\|image_pad\|>' 2 times"):
        tokens.expanded(vision_tokenizer("qwen2.5-vl"), "<|image_pad|> <|image_pad|>", [image_ref(8, 8)])
    with pytest.raises(InputError, match="a prompt has 1 placeholder tokens, and its 1 images need 4"):
        tokens.layout([1, tokens.token_id], [image_ref(16, 16)])


def test_an_image_that_is_too_long_is_named_as_it_was_given(tmp_path: Path) -> None:
    chat = ChatFormat(vision_tokenizer("qwen2.5-vl"))
    chat.image_tokens = partial(tokens_of("qwen2.5-vl", tmp_path).expanded, chat.tokenizer)
    for name, size in (("good", (8, 8)), ("long", (2, 500))):
        (tmp_path / f"{name}.png").write_bytes(image_ref(*size).data)
    rows = [{"input": "?", "image": "good.png"}, {"input": "?", "image": ["good.png", "long.png"]}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    entry = {"data_path": str(tmp_path / "rows.jsonl"), "output_key": ""}
    with pytest.raises(DataError, match=r"^\S+rows\.jsonl, row 2: 'image' 2: image 'long\.png': the image has 2 × 500"):
        load_task_dataset(entry, None, chat, max_prompt_tokens=None, seed=0)


def test_models_that_see_no_images_say_why(tmp_path: Path) -> None:
    from tiny_models import byte_tokenizer, tiny_model

    gemma = tmp_path / "gemma4"
    tiny_model("gemma4-vision", vocab_size=260).save_pretrained(gemma)
    byte_tokenizer().save_pretrained(gemma)
    expand = expand_images_for(str(gemma), load_tokenizer(str(gemma)))
    assert expand is not None
    with pytest.raises(DataError, match="images of gemma4 are not supported"):
        expand("?", [image_ref(8, 8)])
    bare = save_vision_model(tmp_path / "qwen")
    (bare / "preprocessor_config.json").unlink()
    expand = expand_images_for(str(bare), load_tokenizer(str(bare)))
    assert expand is not None
    with pytest.raises(DataError, match=r"has no preprocessor_config\.json"):
        expand("?", [image_ref(8, 8)])


def test_an_image_passes_through_a_frozen_tower_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(str(save_vision_model(tmp_path)), torch.float32, CPU)
    tower = tower_of(model)
    assert tower is not None
    computed: list[str] = []
    compute = VisionTower._compute

    def counted(self: VisionTower, image: ImageRef, device: torch.device) -> ImageEmbeddings:
        computed.append(image.digest)
        return compute(self, image, device)

    monkeypatch.setattr(VisionTower, "_compute", counted)
    image, other = image_ref(16, 16, 1), image_ref(16, 16, 2)
    row = RowImages((((image, other, image), 0, 12),), torch.arange(12))
    first, _ = tower.insert(torch.zeros(1, 12, 32), row)
    second, _ = tower.insert(torch.zeros(1, 12, 32), row)
    assert computed == [image.digest, other.digest]
    assert torch.equal(first, second)
    assert torch.equal(first[:, :4], first[:, 8:])
    assert not torch.allclose(first[:, :4], first[:, 4:8])
    part = RowImages((((image, other), 2, 7),), torch.arange(5))  # a chunk of a prompt that is cut inside both
    assert torch.equal(tower.insert(torch.zeros(1, 5, 32), part)[0], first[:, 2:7])


def test_kept_embeddings_have_a_limit() -> None:
    kept = KeptEmbeddings(max_bytes=100)
    for name in "abc":
        kept.add(name, ImageEmbeddings(torch.zeros(1, 10)))
        kept.find("a")
    assert [kept.find(name) is not None for name in "abc"] == [True, False, True]


def test_families_of_the_tests_are_those_of_the_code() -> None:
    assert {family.model_type for family in VISION_FAMILIES.values()} == set(vision.VISION_FAMILIES)


def test_pixels_are_prepared_a_few_ahead_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(str(save_vision_model(tmp_path)), torch.float32, CPU)
    tower = tower_of(model)
    assert tower is not None
    prepared: list[str] = []
    pixels = type(tower.tokens).pixels

    def counted(self: ImageTokens, image: ImageRef) -> dict[str, torch.Tensor]:
        prepared.append(image.digest)
        return pixels(self, image)

    monkeypatch.setattr(type(tower.tokens), "pixels", counted)
    images = tuple(image_ref(8, 8, seed) for seed in range(40))
    tower.prepare([*images, images[0]])
    assert len(tower.ahead._started) == vision._IMAGES_AHEAD
    tower.insert(torch.zeros(1, 40, 32), RowImages(((images, 0, 40),), torch.arange(40)))
    assert sorted(prepared) == sorted(image.digest for image in images)
    tower.prepare(images)  # all are kept
    assert not tower.ahead._started
    assert len(prepared) == 40


def test_a_model_takes_its_tower_with_it(tmp_path: Path) -> None:
    model = load_model(str(save_vision_model(tmp_path)), torch.float32, CPU)
    copied, tower = copy.deepcopy(model), tower_of(model)
    of_copy = tower_of(copied)
    assert tower is not None
    assert of_copy is not None
    assert of_copy.model is copied
    del tower, of_copy
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
