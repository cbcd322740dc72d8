"""What counts as a credential, and what does not."""

from __future__ import annotations

import html
import itertools
import json
import urllib.parse
from collections.abc import Callable

import pytest

from posttrain.files import redaction
from posttrain.files.redaction import (
    lacks_credential,
    name_credentials,
    redact,
    redact_argument,
    redact_values,
    same_but_for_credentials,
    shown_setting,
    split_userinfo,
    without_credentials,
)


@pytest.fixture(autouse=True)
def nothing_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_named_values", set())
    monkeypatch.setattr(redaction, "_named_variables", set())


@pytest.mark.parametrize(
    "variable",
    ["HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "GITHUB_TOKEN",
     "MLFLOW_TRACKING_PASSWORD", "my_apikey", "AZURE_OPENAI_KEY", "AWS_ACCESS_KEY_ID", "HUGGING_FACE_HUB_TOKEN"],
)  # fmt: skip
def test_values_of_variables_that_are_named_like_a_secret_are_hidden(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, " plain words 42\n")
    assert redact("it said: plain words 42.") == "it said: ***."
    assert redact_values("it said: plain words 42.") == "it said: ***."


NO_SECRETS = [
    *((name, "plain words 42") for name in ("TOKENIZERS_PARALLELISM", "HF_TOKEN_PATH", "MY_MODEL", "KEYBOARD")),
    ("SSH_AUTH_SOCK", "plain words 42"),
    ("A_PASSWORD", "20240117"),  # metrics may contain a number
    ("A_TOKEN", "EMPTY"),
    ("B_TOKEN", "/etc/hostname"),
]


@pytest.mark.parametrize(("variable", "value"), NO_SECRETS, ids=[name for name, _ in NO_SECRETS])
def test_values_of_other_variables_numbers_short_values_and_paths_stay(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert redact(f"0.{value}") == f"0.{value}"


def test_a_variable_that_the_config_names_is_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE", "swordfish")
    assert redact("swordfish") == "swordfish"
    name_credentials({"env": {"x": {"rewards": {"j": {"api_key_env": "JUDGE"}}}}})
    assert redact("a swordfish!") == "a ***!"


def test_a_secret_is_found_as_json_html_and_urls_spell_it(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = 'a"b&c/d<é\\e'
    monkeypatch.setenv("X_API_KEY", secret)
    for spelled in (
        secret,
        json.dumps(secret)[1:-1],
        json.dumps(secret, ensure_ascii=False)[1:-1],
        html.escape(secret),
        urllib.parse.quote(secret, safe=""),
    ):
        assert redact(f"<{spelled}>") == "<***>"


SPELLINGS: dict[str, Callable[[str], str]] = {
    "json": json.dumps,
    "json-utf8": lambda text: json.dumps(text, ensure_ascii=False),
    "repr": repr,
    "ascii": ascii,
    "bytes": lambda text: repr(text.encode()),
    "dict": lambda text: str({"auth": ["it's", text]}),
    "html": html.escape,
    "references": lambda text: text.encode("ascii", "xmlcharrefreplace").decode(),
    "url": lambda text: urllib.parse.quote(text, safe=""),
    "form": urllib.parse.quote_plus,
}


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    "secret", ["pa\"ss\\w\u00f6'r d<PLANT>&+%\U0001f600", '\\\\\\""\'PLANT\\\\', "line PLANT 1\nline PLANT/2\n"]
)
def test_a_secret_is_found_under_any_mixture_of_escapes(
    secret: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("X_TOKEN", secret)
    for names in itertools.product(SPELLINGS, repeat=depth):
        text = f"at {secret.strip()} end"
        for name in names:
            text = SPELLINGS[name](text)
        hidden = redact_values(text)
        assert "PLANT" not in hidden, (names, text, hidden)
        assert "***" in hidden, (names, text, hidden)


def test_what_stands_beside_a_spelled_secret_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("X_TOKEN", 'first"second')
    assert redact(r"""{'a': 'first\"second', 'b': "first'second"}""") == """{'a': '***', 'b': "first'second"}"""


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\\n"])
def test_a_line_of_a_private_key_is_a_secret_on_its_own(line_end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = "-----BEGIN RSA PRIVATE KEY-----", "-----END RSA PRIVATE KEY-----"
    key = line_end.join([frame[0], "MIIEaaaa/bbbb+cc", "ddddeeeeffff2222=", frame[1]])
    monkeypatch.setenv("SSH_PRIVATE_KEY", key)
    assert redact("line MIIEaaaa/bbbb+cc, then ddddeeeeffff2222=") == "line ***, then ***"
    assert redact(json.dumps({"pem": key.replace(line_end, "\n")})) == '{"pem": "***"}'
    assert redact_values(f"a file begins with {frame[0]}") == f"a file begins with {frame[0]}"


def test_many_backslashes_do_not_make_the_search_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("X_TOKEN", '\\\\\\\\""abcd\\\\')
    text = "\\" * 20_000 + "abcd"  # minutes where the pattern can divide them in several ways
    assert redact(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://user:pass@host:8000/v1", "http://user:***@host:8000/v1"),
        ("https://user:p@ss:w@host/v1 next", "https://user:***@host/v1 next"),
        ("postgresql://u:p@db/mlflow", "postgresql://u:***@db/mlflow"),
        ("https://sometoken@host/repo", "https://***@host/repo"),
        ('{"url": "http://a:b@c/d", "x": 1}', '{"url": "http://a:***@c/d", "x": 1}'),
        ("https://host/v1?api_key=abc&x=1", "https://host/v1?api_key=***&x=1"),
        ("https://bucket/o?X-Amz-Signature=0af3", "https://bucket/o?X-Amz-Signature=***"),
        ("http://user:***@host", "http://user:***@host"),
        ("http://user:${oc.env:PASSWORD}@host", "http://user:${oc.env:PASSWORD}@host"),
    ],
)
def test_credentials_in_urls_are_hidden(text: str, expected: str) -> None:
    assert redact(text) == expected
    assert redact(redact(text)) == expected


@pytest.mark.parametrize(
    "token",
    [
        "hf_" + "aBcD" * 8 + "xy",
        "sk-proj-" + "a1B2c3D4" * 4,
        "sk-" + "x9" * 20,
        "ghp_" + "Ab1" * 12,
        "github_pat_" + "11ABC_" * 6,
        "AKIAIOSFODNN7EXAMPLE",
        "xoxb-123456789012-abcdefghij",
        "AIza" + "Sy0_-" * 7,
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.SflKxwRJSMeKKF2QT4",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_well_known_shapes_are_hidden(token: str) -> None:
    assert redact(f"got {token}, which") == "got ***, which"
    assert redact_values(f"got {token}, which") == f"got {token}, which"


def test_an_authorization_header_is_hidden() -> None:
    assert redact("Authorization: Bearer abcdef0123456789abcd") == "Authorization: Bearer ***"
    assert redact("Basic dXNlcjpwYXNzd29yZA==;") == "Basic ***;"


@pytest.mark.parametrize(
    "text",
    [
        "The bearer responsibilities include risk-adjusted-return-on-capital-2024.",
        "Bearer of the ring, basic understanding-of-things",
        "see https://medium.com/@author/post and https://host:8000/v1/users/@me",
        "hf_hub_download, sk-learn-compatible-estimators-everywhere, ghp_",
        "ratio a://b is 3:4 @ noon; e-mail me at a.b@example.com",
        "token=5, password: none, key=value",
        "d404c6f1b2a3d404c6f1b2a3d404c6f1b2a3d404 is a commit",
    ],
)
def test_prose_code_and_hashes_stay(text: str) -> None:
    assert redact(text) == text


def test_settings_lose_credentials_by_key_and_by_content() -> None:
    settings = {
        "base_url": "http://u:pw@h/v1",
        "extra_headers": {"X-Api-Key": "k", "Authorization": "Token abc", "X-Trace": "kept"},
        "extra_body": {"password": "pw", "stop": ["a"], "eos_token": "<eos>", "n": 3},
        "api_key_env": "JUDGE",
    }
    assert without_credentials(settings) == {
        "base_url": "http://u:***@h/v1",
        "extra_headers": {"X-Api-Key": "***", "Authorization": "***", "X-Trace": "kept"},
        "extra_body": {"password": "***", "stop": ["a"], "eos_token": "<eos>", "n": 3},
        "api_key_env": "JUDGE",
    }
    name_credentials({"base_url": "http://u:hun%20ter2@h/v1", "headers": {"X-Api-Key": "opensesame"}})
    assert redact("it got hun ter2, hun%20ter2 and opensesame") == "it got ***, *** and ***"


def test_a_password_in_a_url_may_have_any_character() -> None:
    name_credentials({"base_url": 'https://user:it\'s "odd"@1@host/v1'})
    assert redact('it got it\'s "odd"@1, so') == "it got ***, so"
    assert without_credentials({"base_url": "https://user:it's@host/v1"}) == {"base_url": "https://user:***@host/v1"}
    assert without_credentials({"base_url": "https://to'ken@host"}) == {"base_url": "https://***@host"}


def test_settings_are_compared_without_credentials() -> None:
    for other in ("http://u:new@h", "http://u:***@h", "http://u:${oc.env:PW}@h"):
        assert same_but_for_credentials("base_url", "http://u:old@h", other)
    assert not same_but_for_credentials("base_url", "http://u:old@h", "http://u:old@elsewhere")
    assert same_but_for_credentials("X-Api-Key", "one", "***")
    assert not same_but_for_credentials("model", "one", "two")


def test_values_in_error_messages() -> None:
    assert shown_setting("api_key", "hunter2") == "***"
    assert shown_setting("apikey", "hunter2") == "***"
    assert "pa/ss" not in shown_setting("base_url", "http://user:pa/ss@host")
    assert shown_setting("temperature", "hot") == "'hot'"
    for text in ("env.j.api_key=hunter2", "--api-key=hunter2", "apikey: hunter2", "env.j={api_key: hunter2}"):
        assert "hunter2" not in redact_argument(text)
    assert redact_argument("policy.precision=float32") == "policy.precision=float32"


def test_userinfo_becomes_a_header() -> None:
    assert split_userinfo("http://h:1/v1") == ("http://h:1/v1", None)
    url, header = split_userinfo("http://user:p%40ss@h:1/v1?x=y")
    assert url == "http://h:1/v1?x=y"
    assert header == "Basic dXNlcjpwQHNz"
    assert redact_values("it said dXNlcjpwQHNz") == "it said ***"
    assert lacks_credential("http://user:***@h")
    assert lacks_credential("https://***@h")
    assert not lacks_credential("https://h/***")
