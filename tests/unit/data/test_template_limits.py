"""Chat templates that loop or build giant strings end with an error; those of real models give the text that they
gave."""

from __future__ import annotations

import pytest
from chat_tokenizers import CHATML, byte_tokenizer

from posttrain.data import template_limits
from posttrain.data.chat import ChatFormat
from posttrain.data.errors import DataError

MESSAGES = [
    {"role": "system", "content": "Be."},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}"
            "{% endfor %}{% endfor %}{% endfor %}",
            "more than 1000 steps",
        ),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            "more than 1000 steps",
        ),
        ("{{ 'a' * 10**10 }}", "10 .. 10|1000"),
        ("{{ 'a' * 9999999999 }}", "the number 9999999999"),
        ("{{ ('a' * 999999) * 999 }}", "998999001 characters"),
        ("{{ 999 * ([1] * 999999) }}", "998999001 characters"),
        ("{{ 9999 * 9999 }}", "9999 . 9999; numbers up to"),
        ("{{ 2 ** 1000000 }}", "2 .. 1000000"),
        ("{{ 'a'.ljust(99999999) }}", "the number 99999999"),
        (
            "{% set n = namespace(s='aaaaaaaaaa') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
            "characters",
        ),
        (
            "{% set n = namespace(s='aaaaaaaaaa') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
            "characters",
        ),
    ],
)  # fmt: skip
def test_a_template_without_an_end_is_refused(template: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_STEPS", 1000)
    monkeypatch.setattr(template_limits, "MAX_CHARACTERS", 10**6)
    with pytest.raises(DataError, match=f"chat template.*{reason}"):
        ChatFormat(byte_tokenizer(CHATML), template + "{{ messages[0]['content'] }}")


def test_the_limits_are_of_one_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_STEPS", 50)
    chat = ChatFormat(byte_tokenizer(CHATML), "{% for i in range(20) %}{% endfor %}{{ messages[0]['content'] }}")
    assert [chat.render(MESSAGES) for _ in range(5)] == ["Be."] * 5


def test_loops_and_operators_give_what_they_gave() -> None:
    template = (
        "{% for m in messages if m.role != 'system' %}{{ loop.index0 }}/{{ loop.length }}{{ loop.last }}"
        "{{ loop.first }}{{ loop.previtem.role if loop.previtem }}"
        "{{ '=' * 3 ~ m.role + ':' ~ m['content'] ~ loop.revindex }}"
        "{% else %}none{% endfor %}{% for k, v in {'a': 1}.items() %}{{ k ~ v * 2 }}{% endfor %}"
        "{% for x in absent %}{% else %}E{% endfor %}{{ 2 ** 3 + 1.5 }}{{ [1] + [2] }}{{ 'x' ~ 1 ~ none }}"
        "{% macro m(a) %}<{{ a }}>{% endmacro %}{{ m('q') }}{% for i in range(3) recursive %}{{ i }}{% endfor %}"
    )
    import jinja2

    expected = jinja2.Environment().from_string(template).render(messages=MESSAGES)
    assert ChatFormat(byte_tokenizer(CHATML), template).render(MESSAGES) == expected
