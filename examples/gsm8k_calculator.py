"""GSM8K's worked answers as conversations with a calculator, for supervised tuning before
configs/grpo_calculator_gsm8k.yaml.

    python examples/gsm8k_calculator.py data/gsm8k/train.jsonl.gz data/gsm8k/calculator.jsonl

The answers mark every calculation: "48/2 = <<48/2=24>>24 clips". Each mark becomes a tool call that ends the
assistant's turn, the calculator's result is the next message, and the answer goes on from there. Rows whose marks the
calculator cannot work out, or works out to another number, are left out and counted.
"""

import gzip
import json
import re
import sys
from fractions import Fraction
from pathlib import Path

from posttrain.environments.turns import ToolError
from posttrain.environments.turns.calculator import evaluate, shown

MARK = re.compile(r"<<([^<>=]*)=([^<>]*)>>")


def conversation(question: str, answer: str) -> list[dict[str, str]] | None:
    """The messages, or None where a mark does not hold."""
    messages = [{"role": "user", "content": question}]
    place = 0
    for mark in MARK.finditer(answer):
        expression = mark.group(1).strip()
        try:
            value = evaluate(expression)
            if abs(value - evaluate(mark.group(2))) > Fraction(1, 100):
                return None
        except ToolError:
            return None
        call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
        said = f"{answer[place : mark.start()]}<tool_call>{call}</tool_call>"
        messages += [{"role": "assistant", "content": said}, {"role": "tool", "content": shown(value)}]
        place = mark.end()
    return [*messages, {"role": "assistant", "content": answer[place:]}] if answer[place:].strip() else None


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__)
        return 64
    source, target = map(Path, sys.argv[1:])
    with gzip.open(source, "rt") if source.suffix == ".gz" else source.open() as lines:
        rows = [json.loads(line) for line in lines]
    made = [conversation(row["question"], row["answer"]) for row in rows]
    kept = [messages for messages in made if messages is not None]
    target.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in kept))
    calls = sum(len(messages) // 2 - 1 for messages in kept)
    print(
        f"{len(kept)} of {len(rows)} conversations with {calls} calls in {target}; in the others a mark does not hold"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
