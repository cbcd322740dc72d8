"""Chat templates that take long, take memory or build giant texts, with the reasons for which they are refused under
`LIMITS`."""

from __future__ import annotations

MEMORY_BYTES = 192 << 20
LIMITS = {"time_limit_s": 0.2, "memory_bytes": MEMORY_BYTES, "max_text_bytes": 10**6}
TIME, MEMORY, TEXT = "it takes more than 0.2 s", "it needs more than 192 MiB", "its text has more than"
ANY = f"{TIME}|{MEMORY}|{TEXT}"
# A value that has two of another, 40 times: 2**40 characters, in the memory of 40.
DOUBLED = (
    "{% set n = namespace(s=[1], t=[1]) %}{% for i in range(40) %}{% set n.s = [n.s, n.s] %}{% set n.t = [n.t, n.t] %}"
    "{% endfor %}"
)
OFTEN = "{% set a = 'a' * 2000000 %}{% for i in range(99999) %}"
GROWN = "{% set n = namespace(s='aaaaaaaaaa') %}{% for i in range(99) %}"
ARGUMENTS = "{% macro m() %}{{ varargs | length }}{% endmacro %}"
MACRO = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"

HOSTILE = [
    ("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", TIME),
    ("{{ '{:>2000000000}'.format(1) }}", MEMORY),
    (OFTEN + "{{ a }}{% endfor %}", ANY),
    ("{{ 'a' * 9999999 }}", TEXT),
    (DOUBLED + "{{ n.s }}", ANY),
    # widths
    ("{{ '000000000000{:>2000000000}'.format(1) }}", MEMORY),
    ("{{ '000000000000%2000000000d' % 1 }}", MEMORY),
    ("{{ '{:>{}}'.format(1, '2000000000') }}", MEMORY),
    ("{{ '{a:>{w}}'.format_map({'a': 1, 'w': '2000000000'}) }}", MEMORY),
    # tests that divide
    ("{{ '%2000000000d' is odd }}", MEMORY),
    # texts of nested lists
    (DOUBLED + "{{ n.s | upper }}", ANY),
    (DOUBLED + "{{ n.s | replace('1', '2') }}", ANY),
    # loops that call themselves
    ("{% for i in [1, 1] recursive %}{{ loop([1, 1]) if loop.depth < 60 }}{% endfor %}", TIME),
    # integers of many digits
    ("{% set k = 9999999 %}{% set n = ('f' * k) | int(base=16) %}{{ n // (n // 2 ** (2 * k)) % 7 }}", TIME),
    ("{{ 2.5 | round(999999999, 'ceil') }}", f"{TIME}|{MEMORY}"),
    # views, loops, maps
    (DOUBLED + "{{ {1: n.s}.items() }}", ANY),
    (DOUBLED + "{% for x in [n.s, n.t] %}{{ loop.changed(x) }}{% endfor %}", TIME),
    ("{% for i in range(9999) %}{% set x = dict.fromkeys(range(99999)).keys() - [1] %}{% endfor %}", TIME),
    # argument lists and attribute paths
    (ARGUMENTS + "{% for i in range(9999) %}{{ m(*range(99999)) }}{% endfor %}", TIME),
    ("{% for i in range(99999) %}{% set x = ['a'] | map(attribute='0.' * 99999 ~ '0') | list %}{% endfor %}", ANY),
    # searches from the right, and of sets of characters
    ("{{ ('a' * 999999).rfind('a' * 999 ~ 'b' ~ 'a' * 999) }}", TIME),
    ("{{ ('a' * 999999).strip('b' * 999999 ~ 'a') }}", TIME),
    # lists of single characters
    ("{{ ('あ' * 33000000) | list }}", f"{MEMORY}|{TIME}"),
]
MORE_HOSTILE = [
    (MACRO, TIME),
    ("{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}" + "{% call f() %}" * 30 + "{% endcall %}" * 30, TIME),
    ("{% for i in range(9999) %}{% set x = range(99999) | select | list %}{% endfor %}", TIME),
    ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "recursion"),
    ("{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}", "recursion"),
    # numbers
    ("{{ 'a' * 10**10 }}", MEMORY),
    ("{{ 'a' * 9999999999 }}", MEMORY),
    ("{{ 2 ** 1000000 }}", "4300 digits"),
    ("{{ (((9 ** 64) ** 64) ** 64) ** 64 }}", TIME),
    ("{% set n = namespace(s=9) %}{% for i in range(99) %}{% set n.s = n.s ** 9 %}{% endfor %}", TIME),
    ("{{ (1).to_bytes(9999999, 'big') }}", ANY),
    ("{{ ['%2000000000d'] | select('divisibleby', 2) | list }}", MEMORY),
    # operators
    ("{{ ('a' * 999999) * 999 }}", MEMORY),
    ("{{ 999 * ([1] * 999999) }}", f"{MEMORY}|{TIME}"),
    (GROWN + "{% set n.s = n.s ~ n.s %}{% endfor %}", f"{MEMORY}|{TIME}"),
    (GROWN + "{% set n.s = n.s + n.s %}{% endfor %}", f"{MEMORY}|{TIME}"),
    ("{{ '%2000000000d' % 1 }}", MEMORY),
    ("{{ '%*d' % (9999999, 1) }}", TEXT),
    ("{{ ('%s' * 999) % (('a' * 9999,) * 999) }}", TEXT),
    (OFTEN + "{% set x = 'ab' in a %}{% endfor %}", TIME),
    (OFTEN + "{% set x = a[1:] ~ a %}{% endfor %}", TIME),
    (OFTEN + "{% set x = a == a ~ 'a' %}{% endfor %}", TIME),
    # output
    (GROWN + "{% set x %}{{ n.s }}{{ n.s }}{% endset %}{% set n.s = x %}{% endfor %}", f"{MEMORY}|{TIME}"),
    # methods
    ("{{ '{:{}}'.format(1, 9999999) }}", TEXT),
    ("{{ '{a:>2000000000}'.format_map({'a': 1}) }}", MEMORY),
    ("{{ ('{:>2000000000}' | attr('format'))(1) }}", MEMORY),
    ("{{ ('{:>2000000000}' | safe).format(1) }}", MEMORY),
    ("{{ ('a' | safe).center(9999999) }}", TEXT),
    ("{{ ('{0}' * 9999).format('a' * 9999) }}", ANY),
    ("{{ 'a'.ljust(99999999) }}", ANY),
    ("{{ 'a'.zfill(9999999) }}", TEXT),
    ("{{ ('a' * 9999).replace('a', 'b' * 9999) }}", ANY),
    ("{{ ('a' * 9999).replace('', 'b' * 9999) }}", ANY),
    (GROWN + "{% set n.s = n.s.replace('a', 'aaaa') %}{% endfor %}", f"{MEMORY}|{TIME}"),
    ("{{ ('a' * 9999).join(['b'] * 9999) }}", ANY),
    ("{{ ('a' * 9999).join('b' * 9999) }}", ANY),
    ("{{ ('a' * 9999).join(range(999) | map('string')) }}", TEXT),
    ("{{ ('\t' * 9999).expandtabs(9999) }}", ANY),
    ("{{ ('a' * 9999).translate({97: 'b' * 9999}) }}", ANY),
    ("{{ ('a ' * 9999999).split() }}", ANY),
    ("{{ ('a\n' * 9999999).splitlines() }}", ANY),
    (OFTEN + "{% set x = a.count('ab') %}{% endfor %}", TIME),
    ("{{ strftime_now('%c' * 999999) }}", ANY),
    ("{{ raise_exception('a' * 999999999) }}", MEMORY),
    ("{% for i in range(9999) %}{% set x = dict.fromkeys(range(99999)) %}{% endfor %}", TIME),
    ("{{ lipsum(9999999) }}", TIME),
    # filters
    ("{{ 'a' | center(2000000000) }}", MEMORY),
    ("{{ range(9) | map('center', 999999) | join }}", TEXT),
    ("{% filter center(9999999) %}a{% endfilter %}", TEXT),
    ("{{ [1, [2, [3]]] | tojson(indent=9999999) }}", ANY),
    ("{{ ([[1]] * 9999) | tojson(indent=999) }}", ANY),
    ("{{ ([1] * 9999) | tojson(separators=['a' * 999, 'b']) }}", ANY),
    ("{{ ('a\n' * 9999) | indent(9999) }}", ANY),
    ("{{ '%2000000000d' | format(1) }}", MEMORY),
    ("{{ range(3) | batch(9999999, 'x') | list }}", ANY),
    ("{{ [1] | slice(9999999) | list }}", ANY),
    ("{{ (['a' * 9999] * 999) | join }}", TEXT),
    ("{{ ([1] * 9999) | join('a' * 999) }}", TEXT),
    ("{{ ([[1] * 999] * 9999) | sum(start=[]) }}", ANY),
    ("{% for i in range(9999) %}{% set x = range(99999) | sort %}{% endfor %}", TIME),
    (OFTEN + "{% set x = a | upper %}{% endfor %}", TIME),
    (OFTEN + "{% set x = a | e %}{% endfor %}", TIME),
    # values in values
    *((DOUBLED + "{{ n.s | " + name + " }}", ANY) for name in ("string", "trim", "title", "center", "wordcount")),
    (DOUBLED + "{{ n.s == n.t }}", TIME),
    (DOUBLED + "{{ n.s is eq(n.t) }}", TIME),
    (DOUBLED + "{{ [n.s].index(n.t) }}", TIME),
    (DOUBLED + "{{ 'a' ~ n.s }}", ANY),
    (DOUBLED + "{{ {1: n.s}.values() }}", ANY),
    (DOUBLED + "{{ namespace(a=n.s) }}", ANY),
    (DOUBLED + "{{ [n.s, n.t] | min }}", TIME),
    (DOUBLED + "{{ {}[n] }}{{ {1: 1}.missing.x }}", "hash|undefined|no attribute"),
    # the text of the template
    ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "recursion"),
    ("{% for a in [1] %}" * 60 + "{% endfor %}" * 60, "nested"),
    ("x" * 2**21, "2097.* characters"),
]
