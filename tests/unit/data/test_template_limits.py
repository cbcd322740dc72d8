"""Chat templates that take long or build giant texts end with an error; those of real models give the text that they
gave."""

# ruff: noqa: E501 (templates)

from __future__ import annotations

import time
from typing import Any

import jinja2.sandbox
import pytest
from chat_tokenizers import CHATML, TEMPLATE_FAMILIES, THINKING, TWO_ENDS, byte_tokenizer

from posttrain.data import template_costs, template_limits
from posttrain.data.chat import ChatFormat
from posttrain.data.errors import DataError

MESSAGES = [
    {"role": "system", "content": "Be."},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
]
STEPS, TEXT, NUMBER = "more than 20000 steps", "more than 1000000 characters", "numbers up to"
REFUSED = "not accepted"
# A value that has two of another, 40 times: 2**40 characters, in the memory of 40.
DOUBLED = (
    "{% set n = namespace(s=[1], t=[1]) %}{% for i in range(40) %}{% set n.s = [n.s, n.s] %}{% set n.t = [n.t, n.t] %}"
    "{% endfor %}"
)
LARGE = "{% set a = 'a' * 200000 %}{% for i in range(99) %}"
DEEP = "{% set n = namespace(s=()) %}{% for i in range(999) %}"

HOSTILE = [
    ("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", STEPS),
    ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", STEPS),
    ("{% macro f() %}" + "x{% if 0 %}{% endif %}" * 999 + "{% endmacro %}{% for i in range(99) %}{{ f() }}{% endfor %}", STEPS),
    ("{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}" + "{% call f() %}" * 30 + "{% endcall %}" * 30, STEPS),
    ("{% for i in range(9999) %}{% set x = range(99999) | select | list %}{% endfor %}", STEPS),
    ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "recursion"),
    ("{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}", "recursion|steps"),
    # numbers
    ("{{ 'a' * 10**10 }}", "characters|numbers"),
    ("{{ 'a' * 9999999999 }}", "the number 9999999999"),
    ("{{ 9999 * 9999 }}", "9999 . 9999; numbers up to"),
    ("{{ 2 ** 1000000 }}", "2 .. 1000000"),
    ("{{ (((9 ** 64) ** 64) ** 64) ** 64 }}", NUMBER),
    ("{% set n = namespace(s=9) %}{% for i in range(99) %}{% set n.s = n.s ** 9 %}{% endfor %}", NUMBER),
    ("{{ (1).to_bytes(9999999, 'big') }}", REFUSED),
    ("{{ '000000000000{:>2000000000}'.format(1) }}", TEXT),
    ("{{ '000000000000%2000000000d' % 1 }}", TEXT),
    ("{{ '{:>{}}'.format(1, '2000000000') }}", "width that is a value"),
    ("{{ '%2000000000d' is odd }}", "odd, even or divisible"),
    ("{{ ['%2000000000d'] | select('divisibleby', 2) | list }}", "odd, even or divisible"),
    (DOUBLED + "{{ n.s | upper }}", f"{TEXT}|{STEPS}"),
    # operators
    ("{{ ('a' * 999999) * 999 }}", TEXT),
    ("{{ 999 * ([1] * 999999) }}", TEXT),
    ("{% set n = namespace(s='aaaaaaaaaa') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}", TEXT),
    ("{% set n = namespace(s='aaaaaaaaaa') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}", TEXT),
    ("{{ '%2000000000d' % 1 }}", TEXT),
    ("{{ '%*d' % (9999999, 1) }}", "width"),
    ("{{ ('%s' * 999) % (('a' * 9999,) * 999) }}", TEXT),
    (LARGE + "{% set x = 'b' in a %}{% endfor %}", TEXT),
    (LARGE + "{% set x = a[1:] %}{% endfor %}", TEXT),
    (LARGE + "{% set x = a == a ~ 'a' %}{% endfor %}", TEXT),
    # output
    (LARGE + "{{ a }}{% endfor %}", TEXT),
    ("{% set n = namespace(s='aaaa') %}{% for i in range(99) %}{% set x %}{{ n.s }}{{ n.s }}{% endset %}{% set n.s = x %}{% endfor %}", TEXT),
    # methods
    ("{{ '{:>2000000000}'.format(1) }}", TEXT),
    ("{{ '{:{}}'.format(1, 9999999) }}", "width that is a value"),
    ("{{ '{a:>2000000000}'.format_map({'a': 1}) }}", TEXT),
    ("{{ ('{:>2000000000}' | attr('format'))(1) }}", TEXT),
    ("{{ ('{:>2000000000}' | safe).format(1) }}", TEXT),
    ("{{ ('a' | safe).center(9999999) }}", TEXT),
    ("{{ ('{0}' * 9999).format('a' * 9999) }}", TEXT),
    ("{{ 'a'.ljust(99999999) }}", "the number 99999999"),
    ("{{ 'a'.zfill(9999999) }}", TEXT),
    ("{{ ('a' * 9999).replace('a', 'b' * 9999) }}", TEXT),
    ("{{ ('a' * 9999).replace('', 'b' * 9999) }}", TEXT),
    ("{% set n = namespace(s='aaaa') %}{% for i in range(99) %}{% set n.s = n.s.replace('a', 'aaaa') %}{% endfor %}", TEXT),
    ("{{ ('a' * 9999).join(['b'] * 9999) }}", TEXT),
    ("{{ ('a' * 9999).join('b' * 9999) }}", TEXT),
    ("{{ ('a' * 9999).join(range(999) | map('string')) }}", TEXT),
    ("{{ ('\t' * 9999).expandtabs(9999) }}", TEXT),
    ("{{ ('a' * 9999).translate({97: 'b' * 9999}) }}", REFUSED),
    ("{{ ('a ' * 99999).split() }}", TEXT),
    ("{{ ('a\n' * 99999).splitlines() }}", TEXT),
    (LARGE + "{% set x = a.count('ab') %}{% endfor %}", TEXT),
    ("{{ strftime_now('%c' * 9999) }}", TEXT),
    ("{{ raise_exception('a' * 9999) }}", TEXT),
    ("{% for i in range(99) %}{% set x = dict.fromkeys(range(9999)) %}{% endfor %}", TEXT),
    ("{{ lipsum(9999999) }}", "'lipsum' is undefined"),
    # filters
    ("{{ 'a' | center(2000000000) }}", "the number 2000000000"),
    ("{{ 'a' | center(9999999) }}", TEXT),
    ("{{ range(9) | map('center', 999999) | join }}", TEXT),
    ("{% filter center(9999999) %}a{% endfilter %}", TEXT),
    ("{{ [1, [2, [3]]] | tojson(indent=9999999) }}", TEXT),
    ("{{ ([[1]] * 9999) | tojson(indent=999) }}", TEXT),
    ("{{ ([1] * 9999) | tojson(separators=['a' * 999, 'b']) }}", TEXT),
    ("{{ ('a\n' * 9999) | indent(9999) }}", TEXT),
    ("{{ ('a\n' * 999) | indent('x' * 9999) }}", TEXT),
    ("{{ '%2000000000d' | format(1) }}", TEXT),
    ("{{ range(3) | batch(9999999, 'x') | list }}", TEXT),
    ("{{ [1] | slice(9999999) | list }}", TEXT),
    ("{{ ('a' * 9999) | replace('a', 'b' * 9999) }}", TEXT),
    ("{{ (['a' * 9999] * 999) | join }}", TEXT),
    ("{{ ([1] * 9999) | join('a' * 999) }}", TEXT),
    ("{{ ([1] * 9999) | join(d='a' * 999) }}", TEXT),
    ("{{ [1] | batch(fill_with=1, linecount=9999999) | list }}", TEXT),
    ("{{ [1] | slice(slices=9999999) | list }}", TEXT),
    ("{{ 'a' | center(width=9999999) }}", TEXT),
    ("{{ ('a' * 9999) | replace(new='b' * 9999, old='a') }}", TEXT),
    ("{{ ([[1] * 999] * 9999) | sum(start=[]) }}", "sum"),
    ("{% for i in range(9) %}{% set x = range(9999) | sort %}{% endfor %}", TEXT),
    (LARGE + "{% set x = a | upper %}{% endfor %}", TEXT),
    (LARGE + "{% set x = a | e %}{% endfor %}", TEXT),
    ("{{ 'http://a' | urlize }}", REFUSED),
    ("{{ 'a b' | wordwrap(1) }}", REFUSED),
    # values in values
    (DOUBLED + "{{ n.s }}", TEXT),
    (DOUBLED + "{{ n.s | string }}", TEXT),
    (DOUBLED + "{{ n.s == n.t }}", TEXT),
    (DOUBLED + "{{ n.s is eq(n.t) }}", TEXT),
    (DOUBLED + "{{ [n.s].index(n.t) }}", TEXT),
    (DOUBLED + "{{ 'a' ~ n.s }}", TEXT),
    (DOUBLED + "{{ {1: n.s}.values() }}", TEXT),
    (DOUBLED + "{{ namespace(a=n.s) }}", TEXT),
    (DOUBLED + "{{ [n.s, n.t] | min }}", TEXT),
    (DOUBLED + "{% for x in [n.s, n.t] %}{{ loop.changed(x) }}{% endfor %}", TEXT),
    (DEEP + "{% set n.s = (n.s,) %}{% endfor %}{{ {n.s: 1} }}", "200 deep"),  # Python crashes at a million
    (DEEP + "{% set n.s = (n.s,) %}{% endfor %}{{ {1: 1}[n.s] }}", "200 deep"),
    (DEEP + "{% set n.s = {1: n.s} | items | first %}{% endfor %}{{ {1: 1}.get(n.s) }}", "200 deep"),
    (DEEP + "{% set n.s = n.s | select %}{% endfor %}", "200 deep"),
    # the text of the template
    ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "recursion"),
    ("{% for a in [1] %}" * 60 + "{% endfor %}" * 60, "nested"),
    ("x" * 2**21, "2097.* characters"),
]  # fmt: skip


@pytest.mark.parametrize(("template", "reason"), HOSTILE)
def test_a_template_without_an_end_is_refused(template: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_costs, "MAX_STEPS", 20_000)
    monkeypatch.setattr(template_costs, "STEPS_PER_MESSAGE", 0)
    monkeypatch.setattr(template_costs, "MAX_CHARACTERS", 10**6)
    with pytest.raises(DataError, match=f"chat template.*({reason})") as caught:
        ChatFormat(byte_tokenizer(CHATML), template + "{{ messages[0]['content'] }}")
    assert len(str(caught.value)) < 2000


def test_the_limits_themselves_take_seconds() -> None:
    for template in (HOSTILE[0][0], DOUBLED + "{{ n.s }}"):
        started = time.thread_time()
        with pytest.raises(DataError):
            ChatFormat(byte_tokenizer(CHATML), template)
        assert time.thread_time() - started < 30


def test_the_limits_are_of_one_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_costs, "MAX_STEPS", 150)
    monkeypatch.setattr(template_costs, "STEPS_PER_MESSAGE", 0)
    chat = ChatFormat(byte_tokenizer(CHATML), "{% for i in range(20) %}{% endfor %}{{ messages[0]['content'] }}")
    assert [chat.render(MESSAGES) for _ in range(5)] == ["Be."] * 5


def test_a_long_conversation_has_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_costs, "MAX_CHARACTERS", 2000)
    chat = ChatFormat(byte_tokenizer(CHATML))
    assert len(chat.render([{"role": "user", "content": "a" * 100_000}] * 50)) > 5_000_000


# Each filter and method that is accepted, as templates use them.
ACCEPTED = """
{% for m in messages if m.role != 'system' %}{{ loop.index0 }}/{{ loop.length }}{{ loop.last }}{{ loop.first }}
{{ loop.previtem.role if loop.previtem }}{{ '=' * 3 ~ m.role + ':' ~ m['content'] ~ loop.revindex }}
{% else %}none{% endfor %}{% for k, v in {'a': 1}.items() %}{{ k ~ v * 2 }}{% endfor %}
{% for x in absent %}{% else %}E{% endfor %}{{ 2 ** 3 + 1.5 }}{{ [1] + [2] }}{{ 'x' ~ 1 ~ none }}{{ absent ~ 'x' }}
{% macro m(a, b=2) %}<{{ a }}{{ b }}{{ caller() if caller }}>{% endmacro %}{{ m('q') }}{% call m(1) %}in{% endcall %}
{% for i in [1, [2, [3]]] recursive %}{{ loop(i) if i is iterable else i }}{% endfor %}
{{ 'a-%s-%5.2f%%' % ('x', 1.234) }}{{ '%(a)s' % {'a': 1} }}{{ '{} {a:>5}'.format(1, a='b') }}{{ '%s'|format('z') }}
{{ 'abc'[::-1] }}{{ messages[1:]|length }}{{ messages[-1].content }}{{ {'a': [1, {'b': none}]}|tojson }}
{{ {'b': 'ü<', 'a': 1}|tojson(indent=2, sort_keys=true) }}{{ 'ü'|tojson(ensure_ascii=true) }}{{ [1]|tojson(separators=[',', ':']) }}
{{ ' a b '|trim }}{{ 'a'|upper }}{{ 'A'|lower }}{{ 'ab c'|title }}{{ 'ab'|capitalize }}{{ 'a\nb'|indent(4, true) }}
{{ 'a'|center(5) }}{{ 'aXa'|replace('a', 'b') }}{{ ['a', 'b']|join(', ') }}{{ messages|map(attribute='role')|join('-') }}
{{ messages|selectattr('role', 'equalto', 'user')|list|length }}{{ messages|rejectattr('role', 'in', ['user'])|map(attribute='content')|list }}
{{ [3, 1, 2]|sort(reverse=true) }}{{ ['a']|join(d='-') }}{{ [1, 2]|batch(linecount=1)|list }}{{ messages|sum(attribute='content', start=0) if 0 }}{{ 'a'|center(width=4) }}{{ messages|groupby(attribute='role')|length }}{{ messages|map(attribute='x', default='y')|list }}{{ [3, 1, 2]|sort }}{{ [1, 1, 2]|unique|list }}{{ {'b': 1, 'a': 2}|dictsort }}{{ [1, 2]|sum }}{{ [1, 2]|max }}{{ 'ab'|reverse }}
{{ [1, 2, 3]|batch(2, 0)|list }}{{ [1, 2, 3]|slice(2)|list }}{{ messages|groupby('role')|length }}{{ 'a b'|wordcount }}
{{ '<'|e }}{{ 1|string }}{{ '1'|int + '1.5'|float }}{{ -3|abs }}{{ 2.567|round(1) }}{{ absent|default('d') }}{{ 'abc'|first }}
{{ [1, 2]|last }}{{ 'abc'|list }}{{ 'abcdef ghi jkl'|truncate(8) }}{{ {'a': 1}|items|list }}{{ 'a b'|urlencode }}
{{ (messages|selectattr('role', 'eq', 'nobody')) is iterable }}{% if messages|select('none') %}always{% endif %}
{{ 'a</think>b'.split('</think>')[-1].lstrip('\n').rstrip() }}{{ 'a,b'.rsplit(',', 1) }}{{ 'a\nb'.splitlines() }}{{ 'a b'.split() }}
{{ ','.join(['a', 'b']) }}{{ 'x'.join(messages|map(attribute='role')) }}{{ 'ab'.replace('a', 'c', 1) }}{{ 'a=b'.partition('=') }}
{{ 'abc'.startswith(('a', 'b')) }}{{ 'abc'.find('c') }}{{ 'a'.ljust(3) ~ '|' }}{{ 'aa'.count('a') }}{{ 'pa'.removeprefix('p') }}
{{ {'a': 1}.get('b', 2) }}{{ {'a': 1}.keys()|list }}{{ [1, 2].index(2) }}{{ messages[0].get('content') }}{{ 'A'.casefold() }}
{% set ns = namespace(a=1, l=[]) %}{% set ns.a = ns.a + 1 %}{% set ns.l = ns.l + [ns.a] %}{{ ns.a }}{{ ns.l }}{{ 7 // 2 }}{{ 7 % 4 }}
{% set block %}x{{ 1 }}{% endset %}{{ block }}{% filter upper %}abc{% endfilter %}{{ ('a', 'b') == ('a', 'b') }}{{ 1 < 2 <= 2 }}
{{ 'a' in {'a': 1} }}{{ 'b' not in 'abc' }}{{ {('a', 1): 2}['a', 1] }}{{ dict(a=1) }}{{ cycler(1, 2).next() }}{{ joiner(',')() }}
{{ 'x' is string }}{{ 1 is number }}{{ absent is defined }}{{ 3 is odd }}{{ 4 is divisibleby 2 }}{{ none is none }}{{ 'A' is upper }}
{% for m in messages %}{{ m.content.split('x') }}{{ m.get('role') }}{{ ','.join(['a', m.role]) }}{{ '{}'.format(m) }}{% endfor %}
{% generation %}g{% endgeneration %}{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i > 3 %}{% break %}{% endif %}{{ i }}{% endfor %}
"""


def unlimited(tokenizer: Any, template: str, monkeypatch: pytest.MonkeyPatch, **kwargs: Any) -> str:
    """As transformers alone renders it."""
    from transformers.utils import chat_template_utils

    with monkeypatch.context() as patch:
        patch.setattr(
            chat_template_utils, "ImmutableSandboxedEnvironment", jinja2.sandbox.ImmutableSandboxedEnvironment
        )
        chat_template_utils._compile_jinja_template.cache_clear()
        text = tokenizer.apply_chat_template(MESSAGES[1:], chat_template=template, tokenize=False, **kwargs)
        chat_template_utils._compile_jinja_template.cache_clear()
        return str(text)


@pytest.mark.parametrize("name", [*TEMPLATE_FAMILIES, "chatml", "thinking", "two ends", "all"])
def test_templates_give_what_transformers_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in TEMPLATE_FAMILIES:
        family = TEMPLATE_FAMILIES[name]
        tokenizer, template, kwargs = family.tokenizer(), family.template, family.kwargs
    else:
        template = {"chatml": CHATML, "thinking": THINKING, "two ends": TWO_ENDS, "all": ACCEPTED}[name]
        tokenizer, kwargs = byte_tokenizer(template), {}
    chat = ChatFormat(tokenizer, template, kwargs)
    for opens_answer in (False, True):
        expected = unlimited(tokenizer, template, monkeypatch, add_generation_prompt=opens_answer, **kwargs)
        assert chat._write(MESSAGES[1:], opens_answer=opens_answer) == expected


def test_every_filter_of_jinja_is_accepted_or_refused_on_purpose() -> None:
    refused = {"pprint", "striptags", "urlize", "wordwrap", "xmlattr"}
    assert set(jinja2.sandbox.ImmutableSandboxedEnvironment().filters) - refused == set(template_costs.FILTERS)
    assert template_limits._LimitedSandbox().from_string("{{ 1 }}").render() == "1"
