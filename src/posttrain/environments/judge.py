"""LLM as a judge: a language model behind an HTTP endpoint scores an answer. Runs in a worker process.

If no readable verdict is available after all retries, the completion is unscored; it never counts as a bad answer. All
requests are counted, including those with unusable verdicts. Verdicts are cached across processes, so that the same
question is sent to the same judge once, and a resumed run gets the verdicts of the interrupted one.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import sqlite3
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from posttrain.config.rewards import PLACEHOLDER, JudgeRewardConfig, judge_template
from posttrain.environments.item import BadSetup, ScoringItem, Unscored, encodable, text_of
from posttrain.environments.judge_endpoint import EndpointError, JudgeEndpoint
from posttrain.files import durable
from posttrain.files.digests import digest
from posttrain.files.json_files import JsonMapping, JsonObject, parse_json
from posttrain.files.locks import locked
from posttrain.files.redaction import CREDENTIAL_REMEDY, lacks_credential, redact, redact_values, split_userinfo

_DEFAULT_PROMPT = Path(__file__).with_name("judge_prompt.txt")
_SHOWN_CHARACTERS = 160
_MAX_TOKENS = 10**9  # of one request


class NoVerdict(Exception):
    """The judge's answer contains no usable score."""


def judge_scorer(setup: JsonMapping) -> Callable[[ScoringItem], dict[str, float]]:
    """The scorer for a `JudgeRewardConfig`. Sends no request before there is a completion to judge."""
    base_folder = Path(setup["base_folder"])
    headers = dict(setup["extra_headers"])
    if setup["api_key_env"] is not None:
        key = os.environ.get(setup["api_key_env"], "").strip()
        if not key:
            raise BadSetup(f"api_key_env names the environment variable {setup['api_key_env']}, which is not set")
        headers["Authorization"] = f"Bearer {key}"
    if lacks_credential(setup["base_url"]):
        raise BadSetup(f"base_url is {setup['base_url']}: its password was left out of the file; {CREDENTIAL_REMEDY}")
    url, authorization = split_userinfo(setup["base_url"])
    if authorization is not None and not any(name.lower() == "authorization" for name in headers):
        headers["Authorization"] = authorization
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute()
    cache_path = base_folder / Path(setup["cache_path"] or caches / "posttrain" / "judge.sqlite").expanduser()
    usage_path = base_folder / Path(setup["usage_file"] or cache_path.with_name("judge_usage.json")).expanduser()
    timeout_s = setup["timeout_s"] or JudgeRewardConfig.default_timeout_s
    judge = _Judge(
        setup=setup,
        template=_template(setup, base_folder),
        endpoint=JudgeEndpoint(url + "/chat/completions", headers),
        cache=VerdictCache(cache_path) if setup["cache"] else None,
        usage=UsageFile(usage_path),
        budget_s=timeout_s - min(2.0, 0.1 * timeout_s),  # finish before the pool's time limit, to report the problem
    )
    return judge.score


def _template(setup: JsonMapping, base_folder: Path) -> str:
    if setup["prompt_file"] is None:
        return _DEFAULT_PROMPT.read_text("utf-8") if setup["prompt"] is None else str(setup["prompt"])
    path = base_folder / Path(setup["prompt_file"]).expanduser()
    try:
        return judge_template(path.read_text())
    except (OSError, ValueError) as error:
        raise BadSetup(f"prompt_file is {path}: {error}") from None


@dataclass(frozen=True)
class _Judge:
    setup: JsonMapping
    template: str
    endpoint: JudgeEndpoint
    cache: VerdictCache | None
    usage: UsageFile
    budget_s: float

    def score(self, item: ScoringItem) -> dict[str, float]:
        body = self.request(item)
        key = digest([self.endpoint.url, body])  # all that the verdict depends on
        usage = Usage(completions=1)
        try:
            return self._result(self._score(body, key, item.noise_key, usage), usage)
        except Unscored:
            usage.unscored += 1
            raise
        finally:
            self.usage.add(usage, self._cost(usage))

    def _score(self, body: JsonObject, key: str, noise_key: str, usage: Usage) -> float:
        kept = self.cache.get(key) if self.cache else None
        if kept is not None:
            with contextlib.suppress(NoVerdict):  # the verdict format may have changed since
                score = read_score(kept, self.setup)
                usage.cached += 1
                return score
        text = self._ask(body, key, noise_key, usage)
        if self.cache:
            text = self.cache.put(key, redact_values(text), replaces=kept is not None)
        return read_score(text, self.setup)

    def _result(self, score: float, usage: Usage) -> dict[str, float]:
        low, high = self.setup["score_range"]
        worst, best = self.setup["reward_range"]
        return {
            "reward": worst + (score - low) / (high - low) * (best - worst),
            "judge_score": score,
            "judge_tokens": float(usage.prompt_tokens + usage.completion_tokens),
            "judge_cost": self._cost(usage),
        }

    def _cost(self, usage: Usage) -> float:
        read = usage.prompt_tokens * self.setup["input_price"]
        written = usage.completion_tokens * self.setup["output_price"]
        return float(read + written) / 1e6

    def request(self, item: ScoringItem) -> JsonObject:
        messages = [{"role": "user", "content": filled(self.template, item)}]
        if self.setup["system"] is not None:
            messages.insert(0, {"role": "system", "content": filled(self.setup["system"], item)})
        return {
            "model": self.setup["model"],
            "messages": messages,
            "temperature": self.setup["temperature"],
            "max_tokens": self.setup["max_tokens"],
            **self.setup["extra_body"],
        }

    def _ask(self, body: JsonObject, key: str, noise_key: str, usage: Usage) -> str:
        """The judge's text, which contains a readable score. Every attempt is counted in `usage`."""
        give_up_at = time.monotonic() + self.budget_s
        problem = "no time was left to ask"
        for attempt in range(self.setup["max_retries"] + 1):
            left_s = give_up_at - time.monotonic()
            if left_s <= 0:
                break
            asked_to_wait_s = None
            usage.requests += 1
            try:
                reply = self.endpoint.post(body, min(self.setup["request_timeout_s"], left_s))
                text = _content(reply, usage)
                read_score(text, self.setup)
                return text
            except NoVerdict as error:
                problem = str(error)
            except EndpointError as error:
                problem = str(error)
                if not error.may_pass:
                    raise Unscored(f"the judge refused: {problem}") from None
                asked_to_wait_s = error.retry_after_s
            if attempt == self.setup["max_retries"]:
                break
            pause_s = self._pause_s(attempt, asked_to_wait_s, f"{key}\0{noise_key}\0{attempt}")
            if time.monotonic() + pause_s > give_up_at:
                problem += f"; the next try would come after {pause_s:.0f} s, beyond timeout_s"
                break
            time.sleep(pause_s)
        raise Unscored(f"no verdict after {usage.requests} requests: {problem}")

    def _pause_s(self, attempt: int, asked_to_wait_s: float | None, key: str) -> float:
        """Exponential backoff, with jitter keyed by the question, so that workers do not retry at the same time."""
        jitter = random.Random(key.encode("utf-8", "surrogatepass")).random()
        pause_s = min(self.setup["retry_max_s"], self.setup["retry_base_s"] * 2.0**attempt) * (0.5 + 0.5 * jitter)
        if asked_to_wait_s is None:
            return float(pause_s)
        return asked_to_wait_s + 0.1 * jitter * self.setup["retry_base_s"]


def _content(reply: bytes, usage: Usage) -> str:
    """The text of the first choice. Its cost is counted first, independent of the text."""
    try:
        body = parse_json(reply, parse_int=_integer)
    except ValueError:
        raise NoVerdict(f"the reply is not JSON: {_shown(reply.decode('utf-8', 'replace'))}") from None
    spent = body.get("usage") if isinstance(body, dict) else None
    if isinstance(spent, dict):
        usage.prompt_tokens += _count(spent.get("prompt_tokens"))
        usage.completion_tokens += _count(spent.get("completion_tokens"))
    try:
        text = body["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise NoVerdict(f"the reply has no choices[0].message.content: {_shown(json.dumps(body))}") from None
    if not isinstance(text, str) or not text.strip():
        raise NoVerdict("the judge returned no text")
    return encodable(text)


def _integer(digits: str) -> int | float:
    """Python refuses integers of thousands of digits. One in a reply is not a reason to lose the verdict."""
    return int(digits) if len(digits) < 100 else float(digits)


def _count(value: object) -> int:
    """A count of tokens; one that no reply can have is not counted, and does not affect the verdict."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_TOKENS else 0


def filled(template: str, item: ScoringItem) -> str:
    """The template with its placeholders filled in, in one pass: braces in an answer are not expanded."""
    values = {
        "question": text_of(item.question),
        "response": item.response,
        "reference": "" if item.reference is None else _as_text(item.reference),
        "prompt": item.prompt,
        "conversation": "\n\n".join(
            f"{message.get('role', '')}: {text_of(message.get('content', ''))}"
            for message in [*item.messages, {"role": "assistant", "content": item.response}]
        ),
    }

    def value_of(match: re.Match[str]) -> str:
        if match[1] is not None:
            return f"{{{match[1]}}}"
        if match[2] == "metadata":
            if match[3] not in item.metadata:
                raise Unscored(f"the judge's prompt asks for {match[0]}, and the task's metadata has no such key")
            return _as_text(item.metadata[match[3]])
        return values[match[2]]

    return encodable(PLACEHOLDER.sub(value_of, template))


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def read_score(text: str, setup: JsonMapping) -> float:
    """The score that a verdict states last, within `score_range`. Raises `NoVerdict`."""
    found: object
    if setup["score_pattern"] is not None:
        found = _last_match(text, setup["score_pattern"])
    else:
        found = _last_json_value(text, setup["score_key"])
    if found is None:
        raise NoVerdict(f"the verdict states no score: {_shown(text)}")
    score = _worth(found, setup["labels"])
    low, high = sorted(setup["score_range"])
    if score is None or not low <= score <= high:  # also NaN
        raise NoVerdict(f"the verdict's score is {_shown(str(found))}, not within {setup['score_range']}")
    return score


def _worth(found: object, labels: Mapping[str, float] | None) -> float | None:
    if labels is not None:
        worth = {label.casefold(): value for label, value in labels.items()}
        return worth.get(str(found).strip().casefold())
    if isinstance(found, bool) or not isinstance(found, int | float | str):
        return None
    try:
        return float(found)
    except (ValueError, OverflowError):
        return None


def _last_match(text: str, pattern: str) -> str | None:
    matches = list(re.finditer(pattern, text))
    if not matches:
        return None
    return matches[-1][1] if matches[-1].re.groups else matches[-1][0]


def _last_json_value(text: str, key: str) -> object:
    """The value of `key` in the last JSON object of the text that has it."""
    decoder = json.JSONDecoder()
    for start in reversed([match.start() for match in re.finditer(r"\{", text)]):
        try:
            found, _ = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if key in found:
            return found[key]
    return None


def _shown(text: str) -> str:
    line = redact(" ".join(text.split()))
    return line if len(line) <= _SHOWN_CHARACTERS else line[:_SHOWN_CHARACTERS] + " …"


# -- records -----------------------------------------------------------------------------------------------------------


_WAIT_FOR_LOCK_S = 30.0


class VerdictCache:
    """An SQLite file that maps the hash of a request to the judge's text, shared by processes.

    It may not fail a verdict: if the disk is full or the file is damaged, judging continues without it, with one
    warning.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connection: sqlite3.Connection | None = None
        with self._or_without():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(path, timeout=_WAIT_FOR_LOCK_S, isolation_level=None)
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, text TEXT NOT NULL)")

    def get(self, key: str) -> str | None:
        with self._or_without():
            if self._connection is not None:
                row = self._connection.execute("SELECT text FROM verdicts WHERE key = ?", (key,)).fetchone()
                return None if row is None else str(row[0])
        return None

    def put(self, key: str, text: str, *, replaces: bool = False) -> str:
        """Store a verdict unless there is one already, or in place of one that can no longer be read. Returns the
        stored verdict: of concurrent requests all use the one that came first."""
        with self._or_without():
            if self._connection is not None:
                either = "REPLACE" if replaces else "IGNORE"
                self._connection.execute(f"INSERT OR {either} INTO verdicts VALUES (?, ?)", (key, text))
                return self.get(key) or text
        return text

    @contextlib.contextmanager
    def _or_without(self) -> Any:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            self._connection = None
            print(f"warning: going on without the cache of verdicts {self.path}: {error}", file=sys.stderr)


@dataclass
class Usage:
    """What judging some completions took."""

    completions: int = 0
    cached: int = 0  # of these, answered from the cache
    unscored: int = 0  # of these, left without a verdict
    requests: int = 0  # retries included
    prompt_tokens: int = 0
    completion_tokens: int = 0


class UsageFile:
    """A JSON file with the usage of all processes. It is replaced atomically."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_reported = False

    def add(self, usage: Usage, cost: float) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with locked(self.path.with_name(self.path.name + ".lock")):
                total = self._read()
                for name, value in (*asdict(usage).items(), ("cost", cost)):
                    total[name] = total.get(name, 0) + value
                with durable.replacing(self.path, sync=False) as partial:  # once for every answer
                    partial.write_text(json.dumps(total, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            if not self._is_reported:
                print(f"warning: usage is not being counted in {self.path}: {error}", file=sys.stderr)
            self._is_reported = True

    def _read(self) -> JsonObject:
        try:
            total = dict(parse_json(self.path.read_text()))
        except (OSError, ValueError, TypeError):
            return {}
        return {name: value for name, value in total.items() if isinstance(value, int | float) and abs(value) < 1e18}
