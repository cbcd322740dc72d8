"""OpenAssistant's conversation trees: one conversation of each tree, along the replies that people ranked best.

Rows are single messages that name their parent, as on the hub, or whole trees, as in the `.trees.jsonl.gz` files. Deleted
messages, and what replies to them, are left out. Other conversations of a tree are not used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from posttrain.data.sources import Row

ROLES = {"prompter": "user", "assistant": "assistant"}
Replies = Callable[[Row], Sequence[Row]]


def best_conversations(rows: Iterable[Row]) -> Iterator[Row]:
    """Rows with `messages`. Trees come as they are read; of single messages, all have to be read first."""
    replies: dict[str, list[Row]] = defaultdict(list)
    roots: list[Row] = []
    for row in rows:
        if row.get("messages") is not None:
            yield row  # conversations already assembled
        elif row.get("prompt") is not None:
            yield from _conversation(_message(row.field("prompt"), row), _replies_inside)
        elif row.get("parent_id") is None:
            roots.append(row)
        else:
            replies[str(row.get("parent_id"))].append(row)
    for root in roots:
        yield from _conversation(root, lambda message: replies.get(str(message.field("message_id")), []))


def _message(values: Any, tree: Row) -> Row:
    return Row(values, tree.origin, tree.number)


def _replies_inside(message: Row) -> list[Row]:
    return [_message(values, message) for values in message.get("replies") or []]


def _conversation(root: Row, replies_to: Replies) -> Iterator[Row]:
    """From the root along the best reply; nothing if the root was deleted."""
    messages: list[dict[str, str]] = []
    message: Row | None = root if not root.get("deleted") else None
    while message is not None:
        role = str(message.field("role"))
        messages.append({"role": ROLES.get(role, role), "content": str(message.field("text"))})
        # Without a rank, which prompts and single replies lack, the order of the file decides.
        kept = [reply for reply in replies_to(message) if not reply.get("deleted")]
        message = min(kept, key=_rank, default=None)
    if messages:
        yield Row({"messages": messages}, root.origin, root.number)


def _rank(reply: Row) -> float:
    rank = reply.get("rank")
    return float("inf") if rank is None else float(rank)
