"""Secrets are planted on every way into a run, and then searched in all that it printed and wrote."""

from __future__ import annotations

import base64
import gzip
import http.server
import json
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pytest
import yaml
from tiny_runs import grpo, save_data, save_model, write_rows

from posttrain.cli.main import main
from posttrain.config import load_config
from posttrain.files import redaction

KEY, HEADER, HUB = "judge-key-Zq81", "header-secret-Pm77", "plain-hub-value-Lk20"
PASSWORD, OTHER_PASSWORD = "pass%2Fword-Xw55", "other-word-Yy66"
SHAPE, IN_URL = "hf_" + "QrSt" * 9, "url-secret-Nn31"
PLANTED = (KEY, HEADER, HUB, PASSWORD, unquote(PASSWORD), OTHER_PASSWORD, SHAPE, IN_URL)

LOUD = f"""
import os, zlib

def loud(prompt, response, reference):
    print("the token is", os.environ["HF_TOKEN"], "and", "{SHAPE}")
    if zlib.crc32(response.encode()) % 3 == 0:
        raise ValueError("https://bob:{IN_URL}@host refused " + "x" * 240 + os.environ["HF_TOKEN"])
    return sum(ord(c) % 2 for c in response) / max(1, len(response))
"""


@dataclass
class Judge:
    """Quotes the credentials that it got: in a verdict, or in a 401."""

    url: str = ""
    headers: list[dict[str, str]] = field(default_factory=list)


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    found = Judge()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.headers.append(dict(self.headers))
            kind, _, credential = self.headers["Authorization"].partition(" ")
            quoted = f"{kind} {credential} {self.headers['X-Api-Key']}"
            if kind == "Basic":
                received = base64.b64decode(credential).decode()
                quoted += f" {received} {quote(received, safe='')}"
            if zlib.crc32(body) % 2:
                # Cut to 200 characters in messages: in the middle of the key.
                reply, status = {"error": "y" * 170 + " wrong: " + quoted}, 401
            else:
                reply, status = {"choices": [{"message": {"content": quoted + ' {"score": 5}'}}]}, 200
            content = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        found.url = f"127.0.0.1:{server.server_port}/v1"
        yield found
        server.shutdown()


@pytest.fixture(autouse=True)
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", HUB)
    monkeypatch.setenv("JUDGE", KEY)
    monkeypatch.setattr(redaction, "_named_values", set())
    monkeypatch.setattr(redaction, "_named_variables", set())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted")
    save_model(folder / "model")
    save_data(folder / "data")
    (folder / "data" / "rewards.py").write_text(LOUD)
    rows = [{"input": f"{n} + 1 = ?", "output": f"{n + 1} {HUB}"} for n in range(8)]
    write_rows(folder / "data" / "questions.jsonl", rows)
    return folder


def config(place: Path, judge: Judge, password: str) -> Path:
    shared = {"type": "judge", "model": "m", "max_retries": 0, "num_workers": 2, "timeout_s": 30}
    shared["cache_path"] = str(place / "out" / "judge.sqlite")
    by_url = {"base_url": f"http://user:{password}@{judge.url}", "extra_headers": {"X-Api-Key": HEADER}}
    rewards = {
        "loud": {"type": "python", "function": f"{place / 'data' / 'rewards.py'}:loud", "num_workers": 1},
        "by_key": {**shared, "base_url": f"http://{judge.url}", "api_key_env": "JUDGE"},
        "by_url": {**shared, **by_url},
    }
    file = place / "config.yaml"
    file.write_text(yaml.safe_dump({"grpo": {}, "env": {"mine": {"rewards": rewards}}}))
    return file


def arguments(place: Path, file: Path, *, steps: int) -> list[str]:
    usual = [
        word
        for word in grpo(place / "model", place / "data", place / "out" / "run", steps=steps)
        if "env.mine" not in word
    ]
    small = ["grpo.num_prompts_per_step=2", "policy.train_global_batch_size=4", "checkpointing.save_period=1"]
    return [*usual, *small, "--config", str(file)]


def assert_nothing_leaked(folder: Path, printed: str) -> None:
    assert printed
    for secret in PLANTED:
        assert secret not in printed
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert not any(secret in str(path) for secret in PLANTED)
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        for secret in PLANTED:
            assert secret.encode() not in content, f"{secret} is in {path}"
            assert secret[: len(secret) - 3].encode() not in content, f"most of {secret} is in {path}"


def printed(capfd: pytest.CaptureFixture[str]) -> str:
    captured = capfd.readouterr()
    return captured.out + captured.err


@pytest.mark.invariant
def test_a_run_its_resumption_and_what_is_made_of_it_hold_no_secret(
    place: Path, judge: Judge, capfd: pytest.CaptureFixture[str]
) -> None:
    run = place / "out" / "run"
    assert main(arguments(place, config(place, judge, PASSWORD), steps=2)) == 0
    text = printed(capfd)
    assert "the token is ***" in text, "what reward functions print is shown"
    assert "a rollout could not be scored" in text
    assert_nothing_leaked(place / "out", text)
    assert {row["reason"][:20] for row in map(json.loads, (run / "unscored.jsonl").read_text().splitlines())}
    sent = {headers.get("Authorization", "").partition(" ")[0] for headers in judge.headers}
    assert sent == {"Bearer", "Basic"}, "the endpoint still gets the credentials"
    assert any(headers.get("X-Api-Key") == HEADER for headers in judge.headers)
    saved = yaml.safe_load((run / "config.yaml").read_text())["env"]["mine"]["rewards"]["by_url"]
    assert saved["base_url"] == f"http://user:***@{judge.url}"
    assert saved["extra_headers"] == {"X-Api-Key": "***"}

    # Another password is no other training.
    assert main(arguments(place, config(place, judge, OTHER_PASSWORD), steps=3)) == 0
    text = printed(capfd)
    assert "Resuming from" in text
    assert "base_url" not in text
    assert_nothing_leaked(place / "out", text)

    # The config in the folder lacks the password.
    again = ["grpo", "--config", str(run / "config.yaml"), "grpo.max_num_steps=4"]
    assert main(again) == 64
    assert "its password was left out of the file" in printed(capfd)

    assert main(["convert", str(run), "--to", str(place / "out" / "hf")]) == 0
    samples = write_rows(
        place / "samples.jsonl", [{"prompt": "1", "response": f"{n}", "reference": "2"} for n in range(6)]
    )
    tested = ["rewards", "test", "--config", str(place / "config.yaml"), "--env", "mine", str(samples)]
    assert main([*tested, "--out", str(place / "out" / "scores.jsonl")]) == 0
    evaluated = [
        "eval", str(place / "model"), f"data.dataset_name={place / 'data' / 'questions.jsonl'}",
        "data.problem_key=input", "data.solution_key=output", f"eval.save_path={place / 'out' / 'eval'}",
        "generation.device=cpu", "generation.vllm_cfg.max_model_len=64", "generation.max_new_tokens=8",
        f"env.mine={json.dumps(yaml.safe_load((place / 'config.yaml').read_text())['env']['mine'])}",
    ]  # fmt: skip
    assert main(evaluated) == 0
    gate = place / "gate.yaml"
    gate.write_text("checks: {reward: {metric: reward, worse_by_at_most: 0.2}}")
    pages = ["--json", str(place / "out" / "gate.json"), "--html", str(place / "out" / "gate.html")]
    main(["gate", "--config", str(gate), "--candidate", str(place / "out" / "eval"), "--no-production", *pages])
    assert_nothing_leaked(place / "out", printed(capfd))


def test_the_registry_holds_no_secret(place: Path, judge: Judge, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mlflow", reason="the registry needs the extra `registry`")
    registry = place / "registry"
    add = ["registry", "add", "demo", str(place / "model"), "--registry", str(registry)]
    given = ["--config", str(config(place, judge, PASSWORD)), "--note", f"see https://bob:{IN_URL}@host"]
    assert main([*add, *given]) == 0
    assert main(["registry", "show", "demo", "1", "--registry", str(registry), "--json"]) == 0
    text = printed(capfd)
    assert "https://bob:***@host" in text
    assert_nothing_leaked(registry, text)


@pytest.mark.parametrize(
    "words",
    [
        ["env.j.api_key=hunter2pw"],
        ["env.j.apikey=hunter2pw"],
        ["env.j.api_kye=hunter2pw"],
        ["env.j={type: judge, base_url: 'http://h', model: m, api_key: hunter2pw}"],
        ["env.j.api_key=[hunter2pw"],
        ["env.j.api_key=hunter2pw", "~env.j.api_key=other"],
        ["env.j.base_url=http://user:hunter2pw/x@h/v1"],
        ["env.j.base_url=user:hunter2pw@h/v1://"],
        ["--api-key=hunter2pw"],
    ],
)
def test_a_key_in_the_config_is_refused_without_its_value(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    judge = ["env.j.type=judge", "env.j.base_url=http://h", "env.j.model=m"]
    try:
        code = main(["config", "show", "grpo", *judge, *words])
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code == 64
    assert "hunter2pw" not in printed(capfd)


def test_a_traceback_and_the_log_of_a_library_hold_no_secret(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import logging

    from posttrain.cli import config_command

    def crash(*arguments: object, **options: object) -> int:
        logging.getLogger("third.party").error("the key is %s", KEY)
        raise RuntimeError(f"http://user:{PASSWORD}@host said {HUB}")

    monkeypatch.setenv("THIRD_API_KEY", KEY)
    monkeypatch.setattr(config_command, "load_words", crash)
    assert main(["config", "show", "grpo"]) == 1
    text = printed(capfd)
    assert "RuntimeError: http://user:***@host said ***" in text
    assert not any(secret in text for secret in PLANTED)


def test_a_credential_given_by_a_variable_stays_a_reference_and_can_be_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_PASSWORD", PASSWORD)
    words = ["env.j.type=judge", "env.j.model=m", "env.j.base_url=http://user:${oc.env:JUDGE_PASSWORD}@h/v1"]
    loaded = load_config("grpo", None, words)
    assert loaded.config.env["j"].reward_configs("j")[""].base_url == f"http://user:{PASSWORD}@h/v1"
    file = tmp_path / "config.yaml"
    file.write_text(loaded.to_yaml())
    assert PASSWORD not in file.read_text()
    assert load_config("grpo", file).config == loaded.config


def test_a_child_process_gets_credentials_by_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = f"env.j.extra_headers={{X-Api-Key: {HEADER}}}"
    words = ["env.j.type=judge", "env.j.model=m", f"env.j.base_url=http://user:{PASSWORD}@h/v1", headers]
    loaded = load_config("grpo", None, words)
    text, variables = loaded.to_yaml_and_credentials()
    assert sorted(variables.values()) == sorted([PASSWORD, HEADER])
    assert not any(secret in text for secret in PLANTED)
    file = tmp_path / "train.yaml"
    file.write_text(text)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    child = load_config("grpo", file)
    assert child.config == loaded.config
    assert not any(secret in child.to_yaml() for secret in PLANTED)
