"""What was most likely meant by a key that the schema does not have, and what there is in its place."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import SequenceMatcher

from posttrain.config.schema import ANY_NAME, Node, find, known_keys
from posttrain.config.tree import Path, dotted

_LIKELY = 0.65
_MAX_LISTED = 14  # fields of a section that are named if none of them is like the key
_MIN_BEGINNING = 3  # letters by which a key that was not written out is known


def hint_for(root: Node, path: Path) -> str:
    """To put behind `unknown key`; `path` is the topmost one that is not known, so that what it lies in is."""
    place = find(root, path[:-1])
    assert place is not None, "the topmost unknown key lies in a known section"
    nearest = _nearest(root, place, path)
    hint = f"; did you mean `{dotted(nearest)}`?" if nearest is not None else ""
    if nearest is not None and nearest[:-1] == path[:-1]:
        return hint
    return hint + _listed(place, path[:-1], ";" if nearest is None else "")


def _nearest(root: Node, place: Node, path: Path) -> Path | None:
    """A similar name in the same section, the same name elsewhere, or a very similar one."""
    here = [(_likeness(path[-1], name), (*path[:-1], name)) for name in _fields(place)]
    elsewhere = [(_likeness_elsewhere(path, key), key) for key in _fields_elsewhere(root, path)]
    score, best = max([*here, *elsewhere], default=(0.0, ()), key=lambda pair: pair[0])
    return best if score >= _LIKELY else None


def _fields(section: Node) -> list[str]:
    return [name for name in section.children if name != ANY_NAME]


def _fields_elsewhere(root: Node, path: Path) -> Iterator[Path]:
    """The names of entries are the user's own. They are filled in where the user is among those entries, and nowhere else:
    a name that was never given leads to a place that does not exist."""
    for key in known_keys(root):
        if key[-1] == ANY_NAME:
            continue
        filled = key
        for index, part in enumerate(key):
            if part == ANY_NAME and filled[:index] == path[:index] and index < len(path) - 1:
                filled = (*filled[:index], path[index], *filled[index + 1 :])
        if filled[:-1] != path[:-1] and filled != path[: len(filled)]:
            yield filled


def _likeness(written: str, known: str) -> float:
    shorter, longer = sorted((written, known), key=len)
    is_beginning = longer.startswith(shorter) and len(shorter) >= _MIN_BEGINNING
    alike = SequenceMatcher(None, written, known).ratio()
    return max(alike, 0.7 + 0.1 * alike) if is_beginning else alike


def _likeness_elsewhere(written: Path, known: Path) -> float:
    if written[-1] == known[-1]:  # the right name in the wrong place: the more of the path fits, the likelier
        here = _num_common(written, known)
        return 0.8 + 0.01 * here + 0.03 * _num_common(written[::-1], known[::-1])
    alike = SequenceMatcher(None, written[-1], known[-1]).ratio()
    return 0.75 * max(alike, SequenceMatcher(None, dotted(written), dotted(known)).ratio())


def _num_common(left: Path, right: Path) -> int:
    """How many of their first parts are the same."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def _listed(place: Node, path: Path, separator: str) -> str:
    if place.shape == "value":
        return f"{separator} `{dotted(path)}` takes a value and has no keys"
    fields = _fields(place)
    if not fields or len(fields) > _MAX_LISTED:
        return ""
    return f"{separator} {f'`{dotted(path)}`' if path else 'the file'} has {', '.join(fields)}"
