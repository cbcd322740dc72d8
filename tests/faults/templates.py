"""Hostile and mutated chat templates: each gives a text or is refused, within time and memory; `chat` refuses the
template of a model with 64."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from chat_tokenizers import CHATML, TEMPLATE_FAMILIES, byte_tokenizer
from hostile_templates import HOSTILE, LIMITS, MEMORY_BYTES, MORE_HOSTILE

from faults.campaign import Case, Part
from faults.inputs import worker_of
from faults.lab import Lab, assert_refused
from faults.mutations import mutated

MUTATIONS = 25  # of each real template
IN_COMMANDS = range(1, len(HOSTILE), 6)  # under the limits that users have: up to 10 s each


def cases(lab: Lab, short: bool) -> Iterable[Case]:
    for number, (template, _) in enumerate(HOSTILE[1::8] if short else [*HOSTILE, *MORE_HOSTILE]):
        yield Case(f"hostile-{number}", partial(rendered_or_refused, [template], True))
    for name, family in list(TEMPLATE_FAMILIES.items())[: 1 if short else None]:
        yield Case(f"mutated-{name}", partial(mutations, family.template), tries=MUTATIONS)
    for number in () if short else IN_COMMANDS:
        yield Case(f"chat-{number}", partial(refused_by_chat, lab, HOSTILE[number][0]))


PART = Part("templates", "a chat template gives its text or is refused, within bounded time and memory", cases, 4)


def rendered_or_refused(templates: Iterable[str], is_hostile: bool, folder: Path, chance: random.Random) -> None:
    from posttrain.data import chat
    from posttrain.data.errors import DataError
    from posttrain.data.template_process import RENDERER, TemplateRenderer

    renderer = chat.RENDERER = TemplateRenderer(**LIMITS)
    try:
        for template in templates:
            reason = None
            try:
                chat.ChatFormat(byte_tokenizer(CHATML), template + "{{ messages[0]['content'] }}")
            except DataError as error:
                reason = str(error)
            assert not is_hostile or reason, f"not refused: {template[:500]}"
            assert len(reason or "") < 2000, reason
            process = renderer._process
            if process is not None and process.poll() is None:
                status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                (peak,) = (int(line.split()[1]) << 10 for line in status if line.startswith("VmPeak"))
                assert peak <= MEMORY_BYTES, f"{peak >> 20} MiB: {template[:500]}"
    finally:
        renderer.close()
        chat.RENDERER = RENDERER


def mutations(template: str, folder: Path, chance: random.Random) -> None:
    changed = [mutated(template.encode(), chance).decode("utf-8", "replace") for _ in range(MUTATIONS)]
    rendered_or_refused(changed, False, folder, chance)


def refused_by_chat(lab: Lab, template: str, folder: Path, chance: random.Random) -> None:
    model = shutil.copytree(lab.model, folder / "model")
    (model / "chat_template.jinja").write_text(template + "{{ messages[0]['content'] }}")
    assert_refused(worker_of(lab).run(["chat", str(model)], folder))
