"""Stands in for lm-evaluation-harness and Inspect on the wire: it reads their command lines, asks the server as they
do, and writes files in their formats. A problem is scored by the number of characters in the answer.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from pathlib import Path

MODULES = {"lm_eval": "0.9.9", "inspect_ai": "0.9.9"}
QUESTIONS = ["2 + 2", "3 + 4", "10 - 1"]


def option(name: str, default: str = "") -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


def ask(url: str, key: str, body: dict[str, object]) -> dict[str, object]:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60) as answer:
        found: dict[str, object] = json.load(answer)
        return found


def lm_eval() -> int:
    assert sys.argv[1] == "run"
    assert "--log_samples" in sys.argv
    about = dict(pair.split("=", 1) for pair in option("--model_args").split(","))
    gen = dict(pair.split("=", 1) for pair in option("--gen_kwargs").split(",") if pair)
    folder = Path(option("--output_path"), about["model"])
    folder.mkdir(parents=True)
    configs = {}
    for task in option("--tasks").split(","):
        if task == "missing":
            print("Tasks not found: missing")
            return 1
        configs[task] = {"task": task, "repeats": 1, "metadata": {"base_url": about["base_url"]}}
        rows = []
        for number, question in enumerate(QUESTIONS[: int(option("--limit", "99"))]):
            messages = [{"role": "user", "content": question}]
            body = {"model": about["model"], "messages": messages, "max_tokens": int(gen.get("max_gen_toks", 8))}
            body |= {"temperature": float(gen.get("temperature", 0)), "stop": ["\n\n"], "seed": int(option("--seed"))}
            reply = ask(about["base_url"], os.environ["OPENAI_API_KEY"], body)
            text = reply["choices"][0]["message"]["content"]  # type: ignore[index]
            for name, value in (("strict", float(len(text) % 2)), ("loose", 1.0)):
                rows.append(
                    {"doc_id": number, "target": "4", "resps": [[text]], "filtered_resps": [text[:3]], "filter": name}
                    | {"metrics": ["exact_match", "kinds"], "exact_match": value, "kinds": [True, False]}
                    | {"arguments": {"gen_args_0": {"arg_0": [json.dumps(messages)], "arg_1": {}}}}
                )
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"samples_{task}_2026-01-01T00-00-00.jsonl").write_text(lines)
    (folder / "results_2026-01-01T00-00-00.json").write_text(
        json.dumps({"configs": configs, "versions": dict.fromkeys(configs, 3)})
    )
    return 0


def inspect_ai() -> int:
    assert sys.argv[1] == "eval"
    url, key = option("--model-base-url"), os.environ["POSTTRAIN_API_KEY"]
    model = option("--model").removeprefix("openai-api/posttrain/")
    samples = []
    for number, question in enumerate(QUESTIONS):
        for epoch in range(1, int(option("--epochs", "1")) + 1):
            message = {"role": "user", "content": question}
            body: dict[str, object] = {"model": model, "messages": [message], "max_completion_tokens": 8}
            text = ask(f"{url}/chat/completions", key, body)["choices"][0]["message"]["content"]  # type: ignore[index]
            sample = {"id": number + 1, "epoch": epoch, "input": question, "target": ["4", "four"]}
            sample |= {"messages": [message, {"role": "assistant", "content": text}]}
            sample |= {"output": {"completion": text, "choices": [{"stop_reason": "max_tokens"}]}}
            sample |= {"model_usage": {"m": {"input_tokens": 5, "output_tokens": 8}}}
            score: dict[str, object] = {"value": "CIPN"[len(text) % 4], "answer": text[:2]}
            sample |= {"scores": {"includes": score, "graded": {"value": {"style": 0.5, "note": "no number"}}}}
            if number == 2:
                sample |= {"scores": {}, "error": {"message": "the tool broke"}}
            samples.append(sample)
    about = {"task": "sums", "task_version": 0, "scorers": [{"name": "includes"}]}
    folder = Path(option("--log-dir"))
    folder.mkdir(parents=True)
    (folder / "log.json").write_text(json.dumps({"status": "success", "eval": about, "samples": samples}))
    return 0


def make_python(folder: Path) -> str:
    """An interpreter that finds both packages."""
    for name, version in MODULES.items():
        (folder / name).mkdir(parents=True)
        call = f"import sys, harness_stand_in\nsys.exit(harness_stand_in.{name}())\n"
        (folder / name / "__main__.py").write_text(call)
        (folder / name / "__init__.py").touch()
        about = folder / f"{name}-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    python = folder / "python"
    tests = Path(__file__).parent
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}:{tests}" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)
