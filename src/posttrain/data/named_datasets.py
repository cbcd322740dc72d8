"""The datasets that can be given by name: where they are and which field means what; and those that are refused by name.

Names are NeMo RL's; case, dashes and underscores do not matter, and the hub's own name works as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from posttrain.data.conversations import as_text
from posttrain.data.errors import DataError, nearest
from posttrain.data.open_assistant import best_conversations
from posttrain.data.sources import Row


def first_listed_answer(row: Row) -> str:
    """SQuAD lists what several people answered; the first of them."""
    texts = row.field("answers.text")
    if not texts:
        raise DataError(f"{row.where}: 'answers.text' is empty")
    return as_text(texts[0], row, "answers.text")


def after_hashes(row: Row) -> str:
    """GSM8K's final answer: what stands after `####`, without the commas of large numbers."""
    final = row.get("final_answer")
    if final is not None:
        return as_text(final, row, "final_answer")
    worked, found, answer = str(row.field("answer")).rpartition("####")
    if not found:
        raise DataError(f"{row.where}: 'answer' has no '####' before its final number: {worked[-60:]!r}")
    return answer.strip().replace(",", "")


@dataclass(frozen=True)
class ResponseSpec:
    """Questions with a checkable answer. Of several field names the first that a row has is used."""

    name: str
    aliases: tuple[str, ...] = ()
    hub: str | None = None
    subsets: tuple[str | None, ...] = (None,)
    split: str = "train"
    question: tuple[str, ...] = ("problem", "question")
    answer: tuple[str, ...] | Callable[[Row], str] = ("answer",)
    solution: tuple[str, ...] = ()  # the worked solution, which supervised tuning learns; else the answer
    system: str | None = None  # goes before the question as the system's turn
    conversation: tuple[str, ...] = ()  # whole conversations, for supervised tuning
    is_checkable: bool = True  # its rows have an answer that a reward can check, which GRPO needs
    assemble: Callable[[Iterable[Row]], Iterator[Row]] | None = None  # several rows make a conversation


RESPONSE_DATASETS = (
    ResponseSpec(
        "ResponseDataset",
        aliases=("openai_format", "oai_format_dataset", "general-conversation-jsonl"),
        question=("input",),
        answer=("output",),
        conversation=("messages", "conversations"),
    ),
    ResponseSpec(
        "gsm8k",
        hub="openai/gsm8k",
        subsets=("main",),
        question=("question",),
        answer=after_hashes,
        solution=("answer",),
    ),
    ResponseSpec("MATH-500", hub="HuggingFaceH4/MATH-500", split="test", solution=("solution",)),
    ResponseSpec("AIME2024", aliases=("aime24",), hub="HuggingFaceH4/aime_2024", solution=("solution",)),
    ResponseSpec(
        "AIME2025",
        aliases=("aime25",),
        hub="opencompass/AIME2025",
        subsets=("AIME2025-I", "AIME2025-II"),
        split="test",
    ),
    ResponseSpec("AMC2023", aliases=("amc23",), hub="math-ai/amc23", split="test"),
    ResponseSpec(
        "DeepScaler",
        aliases=("DeepScaleR-Preview",),
        hub="agentica-org/DeepScaleR-Preview-Dataset",
        solution=("solution",),
    ),
    ResponseSpec(
        "OpenMathInstruct-2",
        aliases=("OpenMathInstruct",),
        hub="nvidia/OpenMathInstruct-2",
        split="train_1M",
        answer=("expected_answer",),
        solution=("generated_solution",),
    ),
    ResponseSpec(
        "DAPOMath17K",
        aliases=("dapo_math",),
        hub="BytedTsinghua-SIA/DAPO-Math-17k",
        question=("prompt", "problem"),
        answer=("reward_model.ground_truth", "answer"),
    ),
    ResponseSpec(
        "DAPOMathAIME2024",
        hub="BytedTsinghua-SIA/AIME-2024",
        question=("prompt", "problem"),
        answer=("reward_model.ground_truth", "answer"),
    ),
    ResponseSpec("squad", hub="rajpurkar/squad", system="context", question=("question",), answer=first_listed_answer),
    ResponseSpec(
        "tulu3_sft_mixture",
        aliases=("tulu3",),
        hub="allenai/tulu-3-sft-mixture",
        conversation=("messages",),
        is_checkable=False,
    ),
    ResponseSpec(
        "open_assistant",
        aliases=("oasst", "oasst2"),
        hub="OpenAssistant/oasst2",
        conversation=("messages",),
        is_checkable=False,
        assemble=best_conversations,
    ),
)


@dataclass(frozen=True)
class PreferenceSpec:
    """Two answers to one prompt. The shape of a row is recognised, so a name mostly decides where the rows are.

    `kind` "traces" makes pairs of labelled traces; "packed" is a file that `posttrain data pack` wrote.
    """

    name: str
    aliases: tuple[str, ...] = ()
    hub: str | None = None
    subsets: tuple[str | None, ...] = (None,)
    split: str = "train"
    prompt: str = "prompt"
    chosen: str = "chosen"
    rejected: str = "rejected"
    kind: Literal["rows", "traces", "packed"] = "rows"


PREFERENCE_DATASETS = (
    PreferenceSpec("PreferenceDataset"),
    PreferenceSpec("BinaryPreferenceDataset"),
    PreferenceSpec("NeMo-Aligner", chosen="chosen_response", rejected="rejected_response"),
    PreferenceSpec("HelpSteer3", hub="nvidia/HelpSteer3", subsets=("preference",)),
    PreferenceSpec("Tulu3Preference", aliases=("tulu3",), hub="allenai/llama-3.1-tulu-3-8b-preference-mixture"),
    PreferenceSpec(
        "UltraFeedback",
        aliases=("ultrafeedback_binarized",),
        hub="HuggingFaceH4/ultrafeedback_binarized",
        split="train_prefs",
    ),
    PreferenceSpec("TracePairs", aliases=("Traces",), kind="traces"),
    PreferenceSpec("PackedPairs", kind="packed"),
)

# NeMo RL's datasets that posttrain does not read, with the reason.
REFUSED_DATASETS = {
    **dict.fromkeys(
        ("clevr", "clevr-cogent", "geometry3k", "refcoco", "mmpr-tiny"),
        "its prompts contain images, and posttrain trains on text only",
    ),
    **dict.fromkeys(
        ("avqa", "audiomcq", "mmau", "intent", "intent-train", "intent-bench", "daily-omni"),
        "its prompts contain sound or video, and posttrain trains on text only",
    ),
    "NemoGymDataset": "it is for NeMo-Gym's servers; a conversation with an environment is a class of yours under `env`",
    "arrow_text": "posttrain does not read .arrow files; save them with `datasets` as .parquet and give `data_path`",
}

Spec = TypeVar("Spec", bound=ResponseSpec | PreferenceSpec)


def find_spec(name: str, specs: Sequence[Spec]) -> Spec | None:
    """The dataset of that name, alias or hub name."""
    wanted = _folded(name)
    for spec in specs:
        if wanted in {_folded(known) for known in (spec.name, *spec.aliases, spec.hub or spec.name)}:
            return spec
    return None


def unreadable(name: str) -> str | None:
    """Why posttrain does not read a dataset that NeMo RL has."""
    return next((reason for refused, reason in REFUSED_DATASETS.items() if _folded(name) == _folded(refused)), None)


def refusal(name: str, *, has_pairs: bool, needs_reference: bool) -> str | None:
    """Why a run cannot train on the dataset of that name although the name is known; None if it can, or is not known.

    `has_pairs`: the run learns from preferences. `needs_reference`: it samples answers that are checked.
    """
    if (reason := unreadable(name)) is not None:
        return reason
    response, preference = find_spec(name, RESPONSE_DATASETS), find_spec(name, PREFERENCE_DATASETS)
    if has_pairs and preference is None and response is not None:
        return "it has no preferences; use it with `posttrain grpo` or `posttrain sft`"
    if not has_pairs and response is None and preference is not None:
        return "it holds preferences; use it with `posttrain dpo` or `posttrain rm`"
    if needs_reference and response is not None and not response.is_checkable:
        return "it has conversations without an answer to check; use it with `posttrain sft`"
    return None


def unknown_dataset(name: str, specs: Sequence[ResponseSpec | PreferenceSpec], also: Sequence[str] = ()) -> DataError:
    names = [*(spec.name for spec in specs), *also]
    hint = nearest(name, [*names, *(alias for spec in specs for alias in spec.aliases)])
    return DataError(
        f"unknown dataset {name!r}{hint}. Known: {', '.join(names)}; "
        "or give a hub name such as 'org/name', or a path to .jsonl, .json, .csv or .parquet files"
    )


def _folded(name: str) -> str:
    return re.sub(r"[^a-z0-9/]", "", name.lower())
