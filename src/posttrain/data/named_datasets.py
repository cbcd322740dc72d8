"""The datasets that can be given by name, where they are and what their fields mean; and names that are refused.

Names are NeMo RL's; case, dashes and underscores do not matter, and the hub's own name works as well. Checks names
only; also used by `posttrain config check`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from posttrain.config import DpoRunConfig, GrpoRunConfig, RunConfig
from posttrain.config.data import TRACE_GROUPS, DatasetConfig
from posttrain.data.conversations import as_text
from posttrain.data.errors import DataError, nearest
from posttrain.data.sources import Row, looks_like_path
from posttrain.files.json_files import JsonMapping, JsonObject


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


def tagged_answer(row: Row) -> str:
    """What stands in `<answer>` tags of `solution`, or all of it."""
    solution = as_text(row.field("solution"), row, "solution")
    found = re.search(r"<answer>(.*?)</answer>", solution, re.DOTALL)
    return (found[1] if found else solution).strip()


def referring_question(row: Row) -> str:
    """Asks for the box of the longest of `captions`."""
    captions = row.field("captions")
    if not isinstance(captions, list) or not captions:
        raise DataError(f"{row.where}: 'captions' must be a list of texts")
    caption = max((as_text(caption, row, "captions") for caption in captions), key=len)
    return f"Give the bounding box [x1, y1, x2, y2] of the region that this phrase describes: {caption}"


def normalised_box(row: Row) -> str:
    """`bbox`, corners in pixels, in thousandths of the image's width and height."""
    box = row.field("bbox")
    if not isinstance(box, list) or len(box) != 4 or not all(isinstance(one, int | float) for one in box):
        raise DataError(f"{row.where}: 'bbox' must be the four numbers x1, y1, x2, y2, found {box!r:.80}")
    if len(row.image_column) != 1:
        raise DataError(f"{row.where}: needs one image, it has {len(row.image_column)}")
    [image] = row.image_column
    sizes = (image.width, image.height, image.width, image.height)
    return str([round(1000 * place / size) for place, size in zip(box, sizes, strict=True)])


_OPEN_ASSISTANT_ROLES = {"prompter": "user", "assistant": "assistant"}


def best_conversations(rows: Iterable[Row]) -> Iterator[Row]:
    """OpenAssistant's trees: of each the conversation along the best-ranked replies, as rows with `messages`.

    Rows are single messages that name their parent, as on the hub, or whole trees, as in the `.trees.jsonl.gz` files.
    Trees come as they are read; of single messages, all have to be read first. Deleted messages, and what replies to
    them, are left out. Other conversations of a tree are not used.
    """
    replies: dict[str, list[Row]] = defaultdict(list)
    roots: list[Row] = []
    for row in rows:
        if row.get("messages") is not None:
            yield row  # conversations already assembled
        elif row.get("prompt") is not None:
            root = _within(row.field("prompt"), row)
            yield from _best_conversation(root, lambda one: [_within(r, one) for r in one.get("replies") or []])
        elif row.get("parent_id") is None:
            roots.append(row)
        else:
            replies[str(row.get("parent_id"))].append(row)
    for root in roots:
        yield from _best_conversation(root, lambda message: replies.get(str(message.field("message_id")), []))


def _within(values: Any, tree: Row) -> Row:
    return Row(values, tree.origin, tree.number)


def _best_conversation(root: Row, replies_to: Callable[[Row], Sequence[Row]]) -> Iterator[Row]:
    """From the root along the best reply; nothing if the root was deleted."""
    messages: list[dict[str, str]] = []
    message: Row | None = root if not root.get("deleted") else None
    while message is not None:
        role = str(message.field("role"))
        content = str(message.field("text"))
        messages.append({"role": _OPEN_ASSISTANT_ROLES.get(role, role), "content": content})
        # Without a rank, which prompts and single replies lack, the order of the file decides.
        kept = [(reply.get("rank"), reply) for reply in replies_to(message) if not reply.get("deleted")]
        ranked = [(float("inf") if rank is None else float(rank), reply) for rank, reply in kept]
        message = min(ranked, key=lambda one: one[0], default=(0.0, None))[1]
    if messages:
        yield _within({"messages": messages}, root)


@dataclass(frozen=True)
class NamedDataset:
    """Its names, and where it is on the hub."""

    name: str
    aliases: tuple[str, ...] = ()
    hub: str | None = None
    subsets: tuple[str | None, ...] = (None,)
    split: str = "train"
    hub_of_split: Mapping[str, str] = field(default_factory=dict)  # a dataset of its own, whose split is `train`
    images: tuple[str, ...] = ("images", "image")  # columns
    image_prefix: str = ""  # of paths there, which `image_dir` has not


@dataclass(frozen=True)
class ResponseSpec(NamedDataset):
    """Questions with a checkable answer. Of several field names the first that a row has is used."""

    question: tuple[str, ...] | Callable[[Row], str] = ("problem", "question")
    answer: tuple[str, ...] | Callable[[Row], str] = ("answer",)
    solution: tuple[str, ...] = ()  # the worked solution, which supervised tuning learns; else the answer
    system: str | None = None  # goes before the question as the system's turn
    conversation: tuple[str, ...] = ()  # whole conversations, for supervised tuning
    is_checkable: bool = True  # its rows have an answer that a reward can check, which GRPO needs
    assemble: Callable[[Iterable[Row]], Iterator[Row]] | None = None  # several rows make a conversation


@dataclass(frozen=True)
class PreferenceSpec(NamedDataset):
    """Two answers to one prompt. The shape of a row is recognised, so a name mostly decides where the rows are.

    `kind` "traces" makes pairs of labelled traces; "packed" is a file that `posttrain data pack` wrote. The columns
    that it names are read. `templated`: whether a prompt that is text holds the template; None: by shape.
    """

    prompt: str = "prompt"
    chosen: str = "chosen"
    rejected: str = "rejected"
    chosen_reward: str | None = None
    rejected_reward: str | None = None
    completion: str = "completion"
    label: str = "label"
    templated: bool | None = None
    kind: Literal["rows", "traces", "packed"] = "rows"


Spec = TypeVar("Spec", bound=NamedDataset)


def spec_of(kind: type[Spec], row: JsonMapping, functions: Mapping[str, object]) -> Spec:
    """From a row of a YAML file, which names functions by their words."""
    values: JsonObject = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    values |= {name: functions[row[name]] for name in _MAY_BE_FUNCTIONS if isinstance(row.get(name), str)}
    return kind(**values)


_MAY_BE_FUNCTIONS = ("question", "answer", "assemble", "choices")
_ROWS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
RESPONSE_DATASETS = tuple(spec_of(ResponseSpec, row, globals()) for row in _ROWS["responses"])
PREFERENCE_DATASETS = tuple(spec_of(PreferenceSpec, row, {}) for row in _ROWS["preferences"])
REFUSED_DATASETS: Mapping[str, str] = _ROWS["refused"]  # NeMo RL's that posttrain does not read, with the reason


def find_spec(name: str, specs: Sequence[Spec]) -> Spec | None:
    """The dataset of that name, alias or hub name."""
    wanted = folded(name)
    for spec in specs:
        if wanted in {folded(known) for known in (spec.name, *spec.aliases, spec.hub or spec.name)}:
            return spec
    return None


def unreadable(name: str) -> str | None:
    """Why posttrain does not read a dataset that NeMo RL has."""
    return next((reason for refused, reason in REFUSED_DATASETS.items() if folded(name) == folded(refused)), None)


def check_dataset_names(config: RunConfig) -> None:
    """DataError for the first dataset of `data.train` or `data.validation` that a run would refuse by its name."""
    learns_from_pairs = isinstance(config, DpoRunConfig) or config.scores_answers
    for written in (*config.data.train_sets(), *config.data.validation_sets()):
        entry = written.filled_from(config.data.default)
        if entry.holds_recorded_groups and isinstance(config, GrpoRunConfig):
            continue
        if learns_from_pairs:
            preference_spec(entry)
        else:
            response_spec(entry, needs_reference=isinstance(config, GrpoRunConfig))


def named_path(entry: DatasetConfig) -> str | None:
    """The file or folder that the entry names, if it names one."""
    if entry.data_path:
        return entry.data_path
    name = entry.dataset_name or ""
    return name if looks_like_path(name) or Path(name).exists() else None


def response_spec(entry: DatasetConfig, *, needs_reference: bool) -> ResponseSpec | None:
    """The dataset of that name; None for a path or a hub name, whose rows are read by their keys.

    `needs_reference`: the run samples answers that are checked.
    """
    instead = "it holds preferences; use it with `posttrain dpo` or `posttrain rm`"
    found = _accepted(entry, RESPONSE_DATASETS, PREFERENCE_DATASETS, instead, also=(TRACE_GROUPS,))
    if needs_reference and entry.output_key is None and found is not None and not found.is_checkable:
        reason = "it has conversations without an answer to check; use it with `posttrain sft`"
        raise DataError(f"dataset {entry.dataset_name!r}: {reason}")
    return found


def preference_spec(entry: DatasetConfig) -> PreferenceSpec | None:
    """The same for a run that learns from preferences."""
    instead = "it has no preferences; use it with `posttrain grpo` or `posttrain sft`"
    return _accepted(entry, PREFERENCE_DATASETS, RESPONSE_DATASETS, instead)


def _accepted(
    entry: DatasetConfig, specs: Sequence[Spec], others: Sequence[NamedDataset], instead: str, also: Sequence[str] = ()
) -> Spec | None:
    """The one of `specs` with this name; DataError for a name that is refused, one of `others`, or not known, no path
    and not on the hub."""
    name = entry.dataset_name or ""
    found = find_spec(name, specs)
    reason = unreadable(name) or (instead if found is None and find_spec(name, others) is not None else None)
    if reason is not None:
        raise DataError(f"dataset {name!r}: {reason}")
    if found or not name or "/" in name or (not entry.data_path and named_path(entry)):
        return found
    names = [*(spec.name for spec in specs), *also]
    hint = nearest(name, [*names, *(alias for spec in specs for alias in spec.aliases)])
    raise DataError(
        f"unknown dataset {name!r}{hint}. Known: {', '.join(names)}; "
        "or give a hub name such as 'org/name', or a path to .jsonl, .json, .csv or .parquet files"
    )


def folded(name: str) -> str:
    return re.sub(r"[^a-z0-9/]", "", name.lower())
