"""Chat templates that take long, take memory or build giant texts are refused; those of models give the text that they
give in transformers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import CHATML, TEMPLATE_FAMILIES, THINKING, TWO_ENDS, byte_tokenizer
from hostile_templates import HOSTILE, LIMITS, MEMORY_BYTES, MORE_HOSTILE

from posttrain.data import template_process
from posttrain.data.chat import ChatFormat
from posttrain.data.errors import DataError
from posttrain.data.template_process import TemplateRefused, TemplateRenderer
from posttrain.errors import ExitCode

MESSAGES = [
    {"role": "system", "content": "Be."},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
]


class Measured(TemplateRenderer):
    """Keeps the largest address space that its processes had."""

    peak_bytes = 0

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            status = Path(f"/proc/{self._process.pid}/status")
            for line in status.read_text().splitlines() if status.exists() else []:
                if line.startswith("VmPeak"):
                    self.peak_bytes = max(self.peak_bytes, int(line.split()[1]) << 10)
        super().close()


def one(renderer: TemplateRenderer, text: str = "x", template: str = "<{{ messages[0].content }}>") -> str:
    return next(renderer.render(template, {}, [([{"role": "user", "content": text}], True)]))


@pytest.fixture(scope="module")
def renderer() -> Any:
    found = Measured(**LIMITS)
    yield found
    found.close()


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch, renderer: Measured) -> Measured:
    monkeypatch.setattr("posttrain.data.chat.RENDERER", renderer)
    return renderer


@pytest.mark.parametrize(
    ("template", "reason"), [*HOSTILE, *(pytest.param(*given, marks=pytest.mark.full) for given in MORE_HOSTILE)]
)
def test_a_hostile_template_is_refused(template: str, reason: str, limited: Measured) -> None:
    with pytest.raises(DataError, match=f"chat template refuses.*({reason})") as caught:
        ChatFormat(byte_tokenizer(CHATML), template + "{{ messages[0]['content'] }}")
    assert len(str(caught.value)) < 2000
    assert ChatFormat(byte_tokenizer(CHATML)).render(MESSAGES[:1]).startswith("<|im_start|>system\nBe.")
    limited.close()
    assert limited.peak_bytes <= MEMORY_BYTES


@pytest.mark.full
def test_a_template_that_crashes_python_is_refused() -> None:
    """Nested tuples: their hash needs the stack of C."""
    renderer = TemplateRenderer()
    deep = "{% set n = namespace(s=()) %}" + "{% for i in range(50000) %}{% set n.s = (n.s,) %}{% endfor %}" * 4
    with pytest.raises(TemplateRefused, match=r"the process that renders it ended with signal 11 \(SIGSEGV\)"):
        one(renderer, template=deep + "{{ {1: 1}[n.s] }}")
    assert one(renderer) == "<x>"
    renderer.close()


def test_an_error_names_the_model_and_ends_with_64(limited: Measured) -> None:
    tokenizer = byte_tokenizer(HOSTILE[1][0])
    tokenizer.name_or_path = "/models/other"
    reason = r"\[user, assistant\]: it needs .* \(the template of /models/other\)"
    with pytest.raises(DataError, match=reason) as caught:
        ChatFormat(tokenizer)
    assert caught.value.exit_code == ExitCode.BAD_INPUT


def test_a_long_conversation_may_have_a_long_text(renderer: Measured) -> None:
    messages = [{"role": "user", "content": "a" * 100_000}] * 50
    assert len(next(renderer.render(CHATML, {}, [(messages, True)]))) > 5_000_000


@pytest.mark.parametrize("text", ["\x00\x01\n", "half \ud800 pair", "あ\U0001f642é", ""])
def test_every_text_comes_back(text: str, renderer: Measured) -> None:
    template = "{{ messages[0].content }}|{{ '\\ud800' }}\x00"
    asked = [([{"role": "user", "content": text}], False)]
    assert list(renderer.render(template, {}, asked)) == [f"{text}|\ud800\x00"]


@pytest.mark.parametrize("place", ["message", "variable"])
def test_what_is_nested_too_deep_is_refused(place: str, renderer: Measured) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    messages = [{"role": "user", "content": "a", **({"n": deep} if place == "message" else {})}]
    with pytest.raises(TemplateRefused, match="nested too deep"):
        list(renderer.render("", {"n": deep} if place == "variable" else {}, [(messages, True)]))


def test_the_texts_of_many_conversations_have_one_limit(renderer: Measured) -> None:
    asked = [([{"role": "user", "content": "a"}], False)] * 32
    with pytest.raises(TemplateRefused, match="its text has more than") as caught:
        list(renderer.render("{{ 'a' * 100000 }}", {}, asked))
    assert caught.value.index in (10, 11)


def test_an_error_cannot_move_the_cursor(renderer: Measured) -> None:
    with pytest.raises(TemplateRefused) as caught:
        one(renderer, template=r"{{ raise_exception('\x1b[2Jno\ud800' ~ 'a' * 9999) }}")
    assert str(caught.value).startswith(r"\x1b[2Jno\ud800a")
    assert len(str(caught.value)) < 1100


def test_a_refusal_names_the_conversation_among_many(renderer: Measured) -> None:
    template = "{% if messages[0].content == '70' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
    asked = [([{"role": "user", "content": str(number)}], False) for number in range(100)]
    assert list(renderer.render(template, {}, asked[:70])) == [str(number) for number in range(70)]
    with pytest.raises(TemplateRefused, match="no") as caught:
        list(renderer.render(template, {}, asked))
    assert caught.value.index == 70
    assert list(renderer.render(template, {}, asked[71:])) == [str(number) for number in range(71, 100)]


def test_threads_share_the_process(renderer: Measured) -> None:
    def written(number: int) -> list[str]:
        messages = [{"role": "user", "content": f"{number} " * number}]
        return list(renderer.render("{{ messages[0].content }}", {}, [(messages, True)] * 3))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(written, range(100))) == [[f"{number} " * number] * 3 for number in range(100)]


def test_a_fork_has_a_process_of_its_own() -> None:
    program = """
import os
from posttrain.data.template_process import RENDERER
def text(): return next(RENDERER.render("{{ a }}", {"a": os.getpid()}, [([], True)]))
assert text() == str(os.getpid())
first = RENDERER._process.pid
child = os.fork()
if child == 0:
    assert RENDERER._process is None
    ok = text() == str(os.getpid()) and RENDERER._process.pid != first
    RENDERER.close()
    os._exit(0 if ok else 1)
assert os.waitpid(child, 0)[1] == 0
assert text() == str(os.getpid()) and RENDERER._process.pid == first
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_process_ends_with_its_parent() -> None:
    program = (
        "from posttrain.data.template_process import RENDERER; next(RENDERER.render('', {}, [([], True)])); "
        "print(RENDERER._process.pid, flush=True); input()"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdin is not None
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    give_up_at = time.monotonic() + 60
    while is_running(child) and time.monotonic() < give_up_at:
        time.sleep(0.01)
    assert not is_running(child)
    parent.stdin.close()
    parent.stdout.close()


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_a_process_that_somebody_ended_is_started_again(renderer: Measured) -> None:
    assert one(renderer) == "<x>"
    assert renderer._process is not None
    os.kill(renderer._process.pid, signal.SIGKILL)
    assert one(renderer, "y") == "<y>"


def test_a_signal_during_a_rendering_leaves_no_reply_behind() -> None:
    class Stop(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stop

    renderer = TemplateRenderer()
    one(renderer)
    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Stop):
            list(renderer.render(HOSTILE[0][0], {}, [([], True)]))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert one(renderer, "z") == "<z>"
    renderer.close()


@pytest.mark.parametrize(
    "reply",
    [
        "b'junk' * 99",
        "(2**60).to_bytes(8, 'little')",  # the length of a frame
        "(3).to_bytes(8, 'little') + b't\\xff\\xfe'",  # no UTF-8
        "(2).to_bytes(8, 'little') + b'?x'",
        "(0).to_bytes(8, 'little')",
        "b''",
    ],
)
def test_a_process_that_a_template_has_taken_over_can_reply_with_text_only(
    reply: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program.py"
    ready = "import os, sys\nfd = int(sys.argv[3])\nos.write(fd, bytes(8))\nos.read(fd, 1)\n"
    program.write_text(ready + f"os.write(fd, {reply})")
    monkeypatch.setattr(template_process, "_PROGRAM", program)
    renderer = TemplateRenderer()
    with pytest.raises(TemplateRefused):
        one(renderer)
    renderer.close()


def test_a_process_that_does_not_start_is_no_error_of_the_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_process, "_PROGRAM", tmp_path / "none.py")
    with pytest.raises(RuntimeError, match=r"cannot be rendered: .* exit code 2"):
        one(TemplateRenderer())


def test_the_process_has_no_files_and_no_credentials(renderer: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    renderer.close()
    one(renderer)
    assert renderer._process is not None
    folder = Path(f"/proc/{renderer._process.pid}")
    if not folder.is_dir():
        pytest.skip("needs /proc")
    assert b"secret" not in (folder / "environ").read_bytes()
    assert (folder / "limits").read_text().partition("Max open files")[2].split()[:2] == ["0", "0"]
    for name in ("torch", "transformers", "numpy"):
        assert name not in (folder / "maps").read_text()


# Operations as templates use them.
ACCEPTED = """
{% for m in messages if m.role != 'system' %}{{ loop.index0 }}/{{ loop.length }}{{ loop.last }}{{ loop.first }}
{{ loop.previtem.role if loop.previtem }}{{ '=' * 3 ~ m.role + ':' ~ m['content'] ~ loop.revindex }}
{% else %}none{% endfor %}{% for k, v in {'a': 1}.items() %}{{ k ~ v * 2 }}{% endfor %}
{% for x in absent %}{% else %}E{% endfor %}{{ 2 ** 3 + 1.5 }}{{ [1] + [2] }}{{ 'x' ~ 1 ~ none }}{{ absent ~ 'x' }}
{% macro m(a, b=2) %}<{{ a }}{{ b }}{{ caller() if caller }}>{% endmacro %}{{ m('q') }}{% call m(1) %}in{% endcall %}
{% for i in [1, [2, [3]]] recursive %}{{ loop(i) if i is iterable else i }}{% endfor %}
{{ 'a-%s-%5.2f%%' % ('x', 1.234) }}{{ '%(a)s' % {'a': 1} }}{{ '{} {a:>5}'.format(1, a='b') }}{{ '%s'|format('z') }}
{{ 'abc'[::-1] }}{{ messages[1:]|length }}{{ messages[-1].content }}{{ {'a': [1, {'b': none}]}|tojson }}
{{ {'b': 'ü<', 'a': 1}|tojson(indent=2, sort_keys=true) }}{{ 'ü'|tojson(ensure_ascii=true) }}
{{ [1]|tojson(separators=[',', ':']) }}
{{ ' a b '|trim }}{{ 'a'|upper }}{{ 'A'|lower }}{{ 'ab c'|title }}{{ 'ab'|capitalize }}{{ 'a\nb'|indent(4, true) }}
{{ 'a'|center(5) }}{{ 'aXa'|replace('a', 'b') }}{{ ['a', 'b']|join(', ') }}
{{ messages|map(attribute='role')|join('-') }}
{{ messages|selectattr('role', 'equalto', 'user')|list|length }}
{{ messages|rejectattr('role', 'in', ['user'])|map(attribute='content')|list }}
{{ [3, 1, 2]|sort(reverse=true) }}{{ ['a']|join(d='-') }}{{ [1, 2]|batch(linecount=1)|list }}
{{ messages|sum(attribute='content', start=0) if 0 }}{{ 'a'|center(width=4) }}
{{ messages|groupby(attribute='role')|length }}{{ messages|map(attribute='x', default='y')|list }}
{{ [3, 1, 2]|sort }}{{ [1, 1, 2]|unique|list }}{{ {'b': 1, 'a': 2}|dictsort }}{{ [1, 2]|sum }}{{ [1, 2]|max }}
{{ 'ab'|reverse }}
{{ [1, 2, 3]|batch(2, 0)|list }}{{ [1, 2, 3]|slice(2)|list }}{{ messages|groupby('role')|length }}
{{ 'a b'|wordcount }}
{{ '<'|e }}{{ 1|string }}{{ '1'|int + '1.5'|float }}{{ -3|abs }}{{ 2.567|round(1) }}{{ absent|default('d') }}
{{ 'abc'|first }}
{{ [1, 2]|last }}{{ 'abc'|list }}{{ 'abcdef ghi jkl'|truncate(8) }}{{ {'a': 1}|items|list }}{{ 'a b'|urlencode }}
{{ (messages|selectattr('role', 'eq', 'nobody')) is iterable }}{% if messages|select('none') %}always{% endif %}
{{ 'a</think>b'.split('</think>')[-1].lstrip('\n').rstrip() }}{{ 'a,b'.rsplit(',', 1) }}{{ 'a\nb'.splitlines() }}
{{ 'a b'.split() }}
{{ ','.join(['a', 'b']) }}{{ 'x'.join(messages|map(attribute='role')) }}{{ 'ab'.replace('a', 'c', 1) }}
{{ 'a=b'.partition('=') }}
{{ 'abc'.startswith(('a', 'b')) }}{{ 'abc'.find('c') }}{{ 'a'.ljust(3) ~ '|' }}{{ 'aa'.count('a') }}
{{ 'pa'.removeprefix('p') }}
{{ {'a': 1}.get('b', 2) }}{{ {'a': 1}.keys()|list }}{{ [1, 2].index(2) }}{{ messages[0].get('content') }}
{{ 'A'.casefold() }}
{% set ns = namespace(a=1, l=[]) %}{% set ns.a = ns.a + 1 %}{% set ns.l = ns.l + [ns.a] %}{{ ns.a }}{{ ns.l }}
{{ 7 // 2 }}{{ 7 % 4 }}
{% set block %}x{{ 1 }}{% endset %}{{ block }}{% filter upper %}abc{% endfilter %}{{ ('a', 'b') == ('a', 'b') }}
{{ 1 < 2 <= 2 }}
{{ 'a' in {'a': 1} }}{{ 'b' not in 'abc' }}{{ {('a', 1): 2}['a', 1] }}{{ dict(a=1) }}{{ cycler(1, 2).next() }}
{{ joiner(',')() }}
{{ 'x' is string }}{{ 1 is number }}{{ absent is defined }}{{ 3 is odd }}{{ 4 is divisibleby 2 }}{{ none is none }}
{{ 'A' is upper }}
{% for m in messages %}{{ m.content.split('x') }}{{ m.get('role') }}{{ ','.join(['a', m.role]) }}
{{ '{}'.format(m) }}{% endfor %}
{% generation %}g{% endgeneration %}{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i > 3 %}{% break %}
{% endif %}{{ i }}{% endfor %}
{{ 'see http://a.b' | urlize }}{{ 'a b c' | wordwrap(3) }}{{ '<b>x</b>' | striptags }}{{ {'a': 1} | xmlattr }}
{{ [1, {'a': 2}] | pprint }}{{ 'ab'.translate({97: 'x'}) }}{{ [[1], [2]] | sum(start=[]) }}{{ 'ü'.encode() }}
{{ strftime_now('%Y') }}{{ 10 ** 20 }}{{ 5 | filesizeformat }}{{ dict.fromkeys('ab') }}{{ {'a': 1}.keys() - ['b'] }}
"""


def expected_text(tokenizer: Any, template: str, messages: list[Any], **kwargs: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **kwargs))


@pytest.mark.parametrize("name", [*TEMPLATE_FAMILIES, "chatml", "thinking", "two ends", "all"])
def test_templates_give_what_transformers_gives(name: str) -> None:
    if name in TEMPLATE_FAMILIES:
        family = TEMPLATE_FAMILIES[name]
        tokenizer, template, kwargs = family.tokenizer(), family.template, family.kwargs
    else:
        template = {"chatml": CHATML, "thinking": THINKING, "two ends": TWO_ENDS, "all": ACCEPTED}[name]
        tokenizer, kwargs = byte_tokenizer(template), {}
    chat = ChatFormat(tokenizer, template, kwargs)
    for opens_answer in (False, True):
        expected = expected_text(tokenizer, template, MESSAGES[1:], add_generation_prompt=opens_answer, **kwargs)
        assert chat._write(MESSAGES[1:], opens_answer=opens_answer) == expected


class Named(str):
    def __str__(self) -> str:
        return "another"


@pytest.mark.parametrize(
    "message",
    [
        {"content": "a", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1.5, "y": [True, None]}}}]},
        {"content": "a", "empty": None, "when": date(2024, 7, 26), "raw": b"x", "pair": (1, 2), 3: "number"},
        {"content": "a", "thinking": "hm"},
        {"content": "a", "reasoning": "hm", "thinking": None},
        {"content": Named("a"), "nested": {"name": Named("b")}},
    ],
)
def test_other_keys_of_messages_are_those_of_transformers(message: dict[Any, Any]) -> None:
    template = "{{ messages }}{{ messages | tojson }}{{ style }}{{ tools }}{{ documents }}{{ absent }}"
    tokenizer = byte_tokenizer(template)
    kwargs = {"style": {"a": (1, [2])}, "tools": [{"type": "function", "function": {"name": "f"}}]}
    messages = [{"role": "assistant", **message}]
    assert ChatFormat(tokenizer, kwargs=kwargs)._write(messages, opens_answer=False) == expected_text(
        tokenizer, template, messages, **kwargs
    )


@pytest.mark.parametrize(
    "template",
    ["{% set n = namespace(_a=1) %}", "{% set n = namespace() %}{% set n.__a = 1 %}", "{{ messages.append(1) }}"]
    + [
        "{{ ''.__class__.__mro__ }}",
        "{{ dict.__init__.__globals__ }}",
        "{{ (raise_exception | attr('__globals__')).x }}",
    ],
)
def test_what_the_sandbox_of_transformers_refuses_is_refused(template: str, renderer: Measured) -> None:
    with pytest.raises(Exception, match=r"."):
        expected_text(byte_tokenizer(template), template, MESSAGES)
    with pytest.raises(TemplateRefused):
        list(renderer.render(template, {}, [(MESSAGES, True)]))
