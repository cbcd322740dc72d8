"""docs/doctor.md lists the rules that there are, with their conditions."""

from __future__ import annotations

from pathlib import Path

from posttrain.doctor.doctor import RULES

PAGE = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text("utf-8")


def test_the_table_has_one_line_per_rule() -> None:
    table = PAGE.split("<!-- rules -->")[1].split("<!-- end -->")[0]
    lines = table.strip().splitlines()[2:]
    of = ["all" if len(rule.kinds) == 4 else ", ".join(kind.upper() for kind in rule.kinds) for rule in RULES]
    expected = [
        f"| `{rule.id}` | {kinds} | {rule.condition} | {rule.source} |" for rule, kinds in zip(RULES, of, strict=True)
    ]
    assert lines == expected
