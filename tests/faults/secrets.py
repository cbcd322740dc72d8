"""Planted secrets: each command writes and prints what it has to say, and none of the secrets is in it.

Searched: every file that the command wrote, as bytes and inside .gz and .zip (a `.pt` file is one), and what it
printed; as they are, percent-encoded, and in base64.
"""

from __future__ import annotations

import base64
import gzip
import http.server
import io
import random
import threading
import urllib.parse
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import tiny_runs

from faults import processes
from faults.campaign import Case, Part
from faults.lab import Lab
from faults.processes import Finished, Surroundings
from faults.rewards import judge_address

# Values are unlike anything else, so that a find is a find.
KEY = "planted-key-5f1d0c9ab27e"
PASSWORD = "planted-password-93b1"
TOKENS = {
    "FAULTS_KEY": KEY,
    "OPENAI_API_KEY": "sk-planted0123456789abcdefghijklmnopqrstuvwxyzABCDEF",
    "HF_TOKEN": "hf_plantedAbCdEfGhIjKlMnOpQrStUvWxYz0123",
    "WANDB_API_KEY": "9" * 8 + "plantedabcdef0123456789abcdef012",
    "AWS_SECRET_ACCESS_KEY": "planted/abcdefghij+KLMNOPQRSTUVWXYZ01234",
    "POSTTRAIN_API_KEY": "planted-server-key-77aa",
    "FAULTS_ODD_KEY": "planted\"odd'\\\\k\u00e9y-41c7e0fragment",
    "FAULTS_PRIVATE_KEY": "-----BEGIN X PRIVATE KEY-----\nplantedMIIEfirst/line\nplantedABCDsecond+line\n"
    "-----END X PRIVATE KEY-----",
}
PARTS = ("41c7e0fragment", "plantedMIIEfirst", "plantedABCDsecond")  # of the last two, as every spelling has them
SECRETS = (PASSWORD, *TOKENS.values(), *PARTS)


def cases(lab: Lab, short: bool) -> Iterable[Case]:
    yield Case("run:judge-echoes-the-key", partial(run_with_judge, lab, "401-echoes-the-key", ""))
    yield Case("rewards-test:judge-echoes-the-key", partial(rewards_test, lab, "401-echoes-the-key"))
    yield Case("config:key-in-the-config", partial(inline_key, lab))
    if short:
        return
    yield Case("run:password-in-the-address", partial(run_with_judge, lab, "no-score", f"user:{PASSWORD}@"))
    yield Case("run:both", partial(run_with_judge, lab, "500-echoes-the-key", f"{KEY}:{PASSWORD}@"))
    yield Case("config:password-in-the-address", partial(show_config, lab))
    yield Case("config:password-in-a-bad-address", partial(bad_address, lab))
    yield Case("run:reward-that-raises-with-the-key", partial(reward_that_tells, lab, "raise ValueError(KEY)"))
    yield Case(
        "run:reward-that-prints-the-key", partial(reward_that_tells, lab, "print(KEY); raise ValueError(KEY + '!')")
    )
    odd, several = "os.environ['FAULTS_ODD_KEY']", "os.environ['FAULTS_PRIVATE_KEY']"
    for name, deed in {
        "key-error": f"raise KeyError({odd})",
        "representation": f"print([{odd}, {odd}.encode()]); raise ValueError('%a' % {{'auth': [{odd}]}})",
        "json-in-json": f"import json; raise ValueError(json.dumps({{'a': json.dumps({{'b': {odd}}})}}))",
        "several-lines": f"print({several}); raise ValueError({several})",
        "one-line-of-several": f"raise ValueError({several}.splitlines()[1])",
    }.items():
        yield Case(f"run:reward-that-tells-{name}", partial(reward_that_tells, lab, deed))
    yield Case("run:data-at-an-address-with-a-password", partial(data_address, lab))
    yield Case("convert-and-registry", partial(converted, lab))


PART = Part("secrets", "no key or password is in anything that is written or printed", cases, 1)


def encodings(secret: str) -> Iterator[tuple[str, bytes]]:
    yield "as it is", secret.encode()
    if (quoted := urllib.parse.quote(secret, safe="")) != secret:
        yield "percent-encoded", quoted.encode()
    yield "in base64", base64.b64encode(secret.encode()).rstrip(b"=")[:-1]
    yield "base64 of userinfo", base64.b64encode(f"user:{secret}".encode()).rstrip(b"=")[:-1]


def contents(path: Path) -> Iterator[tuple[str, bytes]]:
    """The bytes of a file, and what is packed in it."""
    yield str(path), str(path).encode()
    content = path.read_bytes()
    yield str(path), content
    if content[:2] == b"\x1f\x8b":
        try:
            yield f"{path} (unpacked)", gzip.decompress(content)
        except (OSError, EOFError, zlib.error):
            yield f"{path} (unpacked)", zlib.decompressobj(31).decompress(content)
    if zipfile.is_zipfile(io.BytesIO(content)):
        with zipfile.ZipFile(io.BytesIO(content)) as packed:
            for name in packed.namelist():
                yield f"{path}/{name}", packed.read(name)


def assert_no_secret(folder: Path, finished: Finished, ours: Iterable[Path] = ()) -> None:
    """`ours`: files of the case itself."""
    mine = set(ours)
    places = [("the console", finished.output.encode())]
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path not in mine:
            places += list(contents(path))
    found = [
        f"{secret[:12]}… {how} in {place}"
        for place, content in places
        for secret in SECRETS
        for how, text in encodings(secret)
        if text in content
    ]
    assert not found, f"{len(found)} finds: {'; '.join(found[:8])}"
    assert len(places) > 1 or finished.output, "nothing was written: nothing was searched"


def run(arguments: list[str], folder: Path) -> Finished:
    return processes.run(arguments, folder / "console.log", Surroundings(TOKENS))


def judge(lab: Lab, behaviour: str, userinfo: str, prefix: str) -> list[str]:
    words = [f"base_url=http://{userinfo}{judge_address(lab)}/{behaviour}/v1", "model=m", "api_key_env=FAULTS_KEY"]
    words += ["timeout_s=5", "request_timeout_s=1", "max_retries=0", "num_workers=4"]
    return [f"{prefix}{word}" for word in words]


def run_with_judge(lab: Lab, behaviour: str, userinfo: str, folder: Path, chance: random.Random) -> None:
    arguments = tiny_runs.grpo(lab.model, lab.data, folder / "run", steps=2)
    arguments = [word for word in arguments if not word.startswith("env.mine.")]
    finished = run([*arguments, "env.mine.type=judge", *judge(lab, behaviour, userinfo, "env.mine.")], folder)
    assert (folder / "run" / "config.yaml").exists(), f"the run did not begin: {finished}"
    assert_no_secret(folder, finished)


def rewards_test(lab: Lab, behaviour: str, folder: Path, chance: random.Random) -> None:
    samples = tiny_runs.write_rows(folder / "samples.jsonl", [{"prompt": "?", "response": "1", "reference": "1"}])
    words = [
        *judge(lab, behaviour, "", ""),
        f"usage_file={folder / 'usage.json'}",
        f"cache_path={folder / 'cache.sqlite'}",
    ]
    finished = run(
        ["rewards", "test", "--type", "judge", str(samples), *words, "--out", str(folder / "out.jsonl")], folder
    )
    assert (folder / "out.jsonl").exists(), finished
    assert_no_secret(folder, finished)


def inline_key(lab: Lab, folder: Path, chance: random.Random) -> None:
    """It is refused; the message must not show it."""
    config = folder / "c.yaml"
    config.write_text(f"env:\n  j:\n    type: judge\n    base_url: http://x/v1\n    model: m\n    api_key: {KEY}\n")
    finished = run(["config", "check", "grpo", "--config", str(config)], folder)
    assert finished.code == 64, finished
    assert_no_secret(folder, finished, [config])
    finished = run(["config", "check", "grpo", "env.j.type=judge", f"env.j.api_key={KEY}"], folder)
    assert finished.code == 64, finished
    assert_no_secret(folder, finished, [config])


def show_config(lab: Lab, folder: Path, chance: random.Random) -> None:
    words = ["env.j.type=judge", f"env.j.base_url=http://user:{PASSWORD}@host/v1", "env.j.model=m"]
    for option in ([], ["--json"], ["--all-origins"]):
        finished = run(["config", "show", "grpo", *words, *option], folder)
        assert_no_secret(folder, finished)


def bad_address(lab: Lab, folder: Path, chance: random.Random) -> None:
    for address in (f"http://user:{PASSWORD}@host:port/v1", f"ftp://user:{PASSWORD}@host/v1", f"user:{PASSWORD}@host"):
        finished = run(
            ["config", "check", "grpo", "env.j.type=judge", f"env.j.base_url={address}", "env.j.model=7.5"], folder
        )
        assert_no_secret(folder, finished)
        arguments = tiny_runs.grpo(lab.model, lab.data, folder / "run", steps=1)
        words = ["env.mine.type=judge", f"env.mine.base_url={address}", "env.mine.model=m"]
        finished = run([*(word for word in arguments if not word.startswith("env.mine.")), *words], folder)
        assert_no_secret(folder, finished)


def reward_that_tells(lab: Lab, deed: str, folder: Path, chance: random.Random) -> None:
    reward = folder / "r.py"
    reward.write_text(
        f"import os\nKEY = os.environ['FAULTS_KEY']\ndef f(prompt, response, reference):\n"
        f"    if len(response) % 2:\n        {deed}\n    return 1.0\n"
    )
    finished = run(tiny_runs.grpo(lab.model, lab.data, folder / "run", steps=2, reward=f"{reward}:f"), folder)
    assert_no_secret(folder, finished, [reward])


def data_address(lab: Lab, folder: Path, chance: random.Random) -> None:
    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(403)

        do_HEAD = do_GET

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://user:{PASSWORD}@127.0.0.1:{server.server_port}/rows.jsonl"
        arguments = tiny_runs.sft(lab.model, lab.data, folder / "run", steps=1)
        finished = run([*arguments, f"data.train={{dataset_name: ResponseDataset, data_path: '{address}'}}"], folder)
        server.shutdown()
    assert finished.code != 0, finished
    assert_no_secret(folder, finished)


def converted(lab: Lab, folder: Path, chance: random.Random) -> None:
    """A run whose config has a password in an address becomes a model with a card, and a version with lineage."""
    arguments = tiny_runs.grpo(lab.model, lab.data, folder / "run", steps=2)
    arguments = [word for word in arguments if not word.startswith("env.mine.")]
    words = ["env.mine.type=judge", *judge(lab, "no-score", f"user:{PASSWORD}@", "env.mine.")]
    finished = run([*arguments, *words, "checkpointing.save_consolidated=true"], folder)
    assert_no_secret(folder, finished)
    finished = run(["convert", str(folder / "run"), "--to", str(folder / "hf")], folder)
    assert (folder / "hf" / "README.md").exists(), finished
    assert_no_secret(folder, finished)
    words = ["--config", str(folder / "run" / "config.yaml"), "--registry", str(folder / "registry"), "--json"]
    finished = run(["registry", "add", "m", str(folder / "hf"), *words], folder)
    assert finished.code == 0, finished
    assert_no_secret(folder, finished)
