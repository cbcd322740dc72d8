"""A small model learns to look: which of four squares is red? CPU, about a minute, no network.

    python examples/red_square.py

Makes a vision-language model of random weights (Qwen2.5-VL's architecture) and pictures of four squares, teaches it the
form of an answer by SFT, and lets GRPO reward right answers. Then it asks about pictures that the model has not seen,
and about the same pictures in another order: an answer that does not depend on the picture is right in one of four.
"""

import argparse
import json
import random
import sys
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from posttrain.apps.demo.arithmetic import build_tokenizer
from posttrain.apps.evaluate.results import read_evaluation
from posttrain.cli.main import main as posttrain

FOLDER = Path("results/red_square")
QUESTION = "Which square is red?"
SQUARE = 28  # pixels
NUM_TRAINED, NUM_UNSEEN = 640, 128
OTHERS = [(40, 60, 220), (30, 170, 60), (235, 205, 40), (140, 60, 190), (20, 190, 200), (120, 120, 120)]
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ message['content'] }}<|end|>{% else %}"
    "<|ask|>{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|image_pad|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|answer|>{% endif %}{% endfor %}"
)


def right(prompt: str, response: str, reference: str) -> float:
    """The reward."""
    return float(response.strip() == reference)


def draw(rng: random.Random) -> tuple[Image.Image, str]:
    """Four squares, one of them red; and which, counted from the upper left. No two pictures are the same."""
    red = rng.randrange(4)
    picture = Image.new("RGB", (2 * SQUARE, 2 * SQUARE), "white")
    pen, colours = ImageDraw.Draw(picture), rng.sample(OTHERS, 4)
    for place in range(4):
        colour = (220, 40, 40) if place == red else colours[place]
        shade = tuple(max(0, min(255, part + rng.randint(-25, 25))) for part in colour)
        x, y = SQUARE * (place % 2) + rng.randrange(8), SQUARE * (place // 2) + rng.randrange(8)
        pen.rectangle((x, y, x + SQUARE - 9, y + SQUARE - 9), fill=shade)
    return picture, str(red + 1)


def write_data(folder: Path) -> None:
    rng = random.Random(0)
    folder.mkdir(parents=True)
    rows = []
    for index in range(NUM_TRAINED + NUM_UNSEEN):
        picture, answer = draw(rng)
        picture.save(folder / f"{index}.png")
        rows.append({"input": QUESTION, "output": answer, "images": [f"{index}.png"]})
    unseen = rows[NUM_TRAINED:]
    shuffled = [{**row, "images": other["images"]} for row, other in zip(unseen, unseen[1:] + unseen[:1], strict=True)]
    for name, part in (("train", rows[:NUM_TRAINED]), ("unseen", unseen), ("shuffled", shuffled)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


def build_model(folder: Path) -> int:
    tokenizer: PreTrainedTokenizerFast = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|ask|>", "<|answer|>", "<|image_pad|>"]})
    tokenizer.chat_template = TEMPLATE
    text = {"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 3, 3]}}
    text |= {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "depth": 1, "out_hidden_size": 64}
    tower |= {"patch_size": 14, "spatial_merge_size": 2, "window_size": 112, "fullatt_block_indexes": [0]}
    image_token = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    config = AutoConfig.for_model(
        "qwen2_5_vl", text_config=text, vision_config=tower, image_token_id=image_token, tie_word_embeddings=True
    )
    torch.manual_seed(0)
    config.text_config.initializer_range = config.vision_config.initializer_range = 0.1
    model = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil().save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def settings(kind: str, model: Path, steps: int, learning_rate: float) -> list[str]:
    return [
        kind,
        f"policy.model_name={model}",
        "policy.precision=float32",
        "policy.device=cpu",
        "policy.max_total_sequence_length=64",
        "policy.sequence_packing={enabled: true, train_mb_tokens: 8192, logprob_mb_tokens: 8192}",
        "policy.optimizer.name=torch.optim.AdamW",
        f"policy.optimizer.kwargs={{lr: {learning_rate}, weight_decay: 0.0}}",
        "policy.train_global_batch_size=64",
        f"{kind}.max_num_steps={steps}",
        f"{kind}.max_num_epochs=1000",
        f"{kind}.val_period=0",
        f"{kind}.val_at_start=false",
        f"data.train={{dataset_name: ResponseDataset, data_path: {FOLDER / 'data' / 'train.jsonl'}}}",
        "data.validation=null",
        f"checkpointing.checkpoint_dir={FOLDER / kind}",
        "checkpointing.metric_name=null",
        f"checkpointing.save_period={steps}",
        "cluster.launcher=local",
    ]


def accuracy(model: Path, rows: str) -> float:
    """Greedy answers to pictures that were not trained on."""
    folder = FOLDER / "eval" / f"{model.name}_{rows}"
    reward = [f"env.look.function={Path(__file__).resolve()}:right", "env.look.num_workers=1"]
    settings = ["data.problem_key=input", "data.solution_key=output", "generation.max_new_tokens=4"]
    settings += ["generation.device=cpu", "generation.temperature=0", "generation.vllm_cfg.max_model_len=64"]
    command = ["eval", str(model), f"data.dataset_name={FOLDER / 'data' / rows}.jsonl", f"eval.save_path={folder}"]
    code = posttrain([*command, *settings, *reward, "--quiet"])
    if code:
        sys.exit(code)
    problems = read_evaluation(folder).problems
    show([problem.samples[0].text for problem in problems[:8]], FOLDER / f"{model.name}_{rows}.png")
    return sum(problem.samples[0].reward or 0.0 for problem in problems) / len(problems)


def show(answers: list[str], file: Path) -> None:
    """The first unseen pictures with the model's answers."""
    size = 2 * SQUARE + 16
    sheet = Image.new("RGB", (size * len(answers), size + 20), "white")
    for index, answer in enumerate(answers):
        picture = Image.open(FOLDER / "data" / f"{NUM_TRAINED + index}.png")
        sheet.paste(picture, (size * index + 8, 8))
        ImageDraw.Draw(sheet).text((size * index + size // 2 - 4, size), answer, fill="black")
    sheet.resize((sheet.width * 2, sheet.height * 2)).save(file)


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    if not (FOLDER / "data").exists():
        write_data(FOLDER / "data")
        print(f"Pictures, and a model of {build_model(FOLDER / 'model'):,} random weights.", flush=True)
    if code := posttrain(settings("sft", FOLDER / "model", 50, 3e-3)):
        return code
    grpo = [
        "grpo.num_prompts_per_step=32",
        "grpo.num_generations_per_prompt=8",
        "policy.train_global_batch_size=256",
        "policy.generation.max_new_tokens=4",
        "data.default.env_name=look",
        f"env.look.function={Path(__file__).resolve()}:right",
        "env.look.num_workers=1",
    ]
    taught = FOLDER / "sft" / "step_50" / "policy" / "weights" / "model"
    if code := posttrain([*settings("grpo", taught, 40, 1e-3), *grpo]):
        return code
    trained = FOLDER / "grpo"
    for name, model in (("random weights", FOLDER / "model"), ("after SFT", FOLDER / "sft"), ("after GRPO", trained)):
        print(f"{name:>15}: {accuracy(model, 'unseen'):.0%} of unseen pictures")
    print(f"{'':>15}  {accuracy(trained, 'shuffled'):.0%} where each question comes with the picture of another")
    return 0


if __name__ == "__main__":
    sys.exit(main())
