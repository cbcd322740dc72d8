"""Credentials are left out of everything that is written or printed. Decides what is one; knows no file and no stream.

Three kinds are replaced by `***`:

- values of named secrets: environment variables that the config names as a key, those whose names end like one
  (`HF_TOKEN`, `WANDB_API_KEY`, `AWS_SECRET_ACCESS_KEY`, …), and credentials that stand in the config itself;
- userinfo in URLs, and query parameters such as `api_key`;
- texts with the shape of a well-known token (`hf_…`, `sk-…`, `ghp_…`, `AKIA…`, a JWT, `Bearer …`, a private key).

Text of models and data is searched for values of named secrets only (`redact_values`): it may be trained on later, and
what merely looks like a token is part of it.
"""

from __future__ import annotations

import base64
import html.entities
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

HIDDEN = "***"
CREDENTIAL_REMEDY = (
    "give it in the config that the command is started with, e.g. as https://user:${oc.env:PASSWORD}@host"
)
_MIN_NAMED_CHARACTERS = 6  # of a value that the config names: `EMPTY` is what servers without a key are given
_MIN_FOUND_CHARACTERS = 8  # of a value that only the name of its variable points to
_SECRET_VARIABLE = re.compile(
    r"(?:^|_)(?:KEY|APIKEY|KEY_ID|SECRET|TOKEN|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)$",
    re.IGNORECASE,
)
_SECRET_KEY = re.compile(
    r"(?:^|[_.-])(?:(?:api|access|secret|private|subscription)[_-]?key|password|passwd|passphrase|secret|cookie"
    r"|(?:hf|api|access|auth|bearer|session|refresh)[_-]?token|authorization)$|^(?:x-[\w-]*)?token$",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"[\d.eE+-]*")  # would be found in metrics
_NAMES_VARIABLE = re.compile(r"(?:^|\.)api_key_env(?:_var)?$")
REFERENCE = re.compile(r"\$\{oc\.env:[^}]*\}")
_URL = re.compile(r"(?P<scheme>[a-zA-Z][\w+.-]*://)(?P<userinfo>[^/?#]*)(?=@)")
_IN_URLS = [
    re.compile(pattern)
    for pattern in (
        r"(?P<kept>://[^\s/?#@:\"'<>\\]*:)(?P<secret>[^\s/?#\"'<>\\]+)(?=@)",
        r"(?P<kept>://)(?P<secret>[^\s/?#@:\"'<>\\]+)(?=@)",
        r"(?P<kept>[?&](?:amp;)?(?i:api[_-]?key|key|(?:access_|auth_)?token|password|secret|sig|signature"
        r"|X-Amz-Signature|X-Amz-Credential|X-Amz-Security-Token)=)(?P<secret>[^\s&#\"'<>\\]+)",
    )
]
# A search for these is far faster than the patterns, and most text, such as megabytes of a report, has none.
_STARTS = (
    "Bearer",
    "Basic",
    "hf_",
    "ghp_",
    "gho_",
    "ghr_",
    "ghs_",
    "ghu_",
    "github_pat_",
    "xox",
    "glpat-",
    "AKIA",
    "ASIA",
    "AIza",
    "sk-",
    "eyJ",
    "-----BEGIN ",
)
_SHAPES = re.compile(
    r"(?P<kept>\b(?:Bearer|Basic)\s+)(?P<secret>(?=[\w.~+/-]*\d)[\w.~+/-]{16,}=*)"
    r"|\b(?:hf_[A-Za-z0-9]{30,}|gh[oprsu]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}"
    r"|xox[abeoprs]-[A-Za-z0-9-]{10,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{35}|sk-(?=[\w-]*\d)[\w-]{20,}"
    r"|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,})(?![A-Za-z0-9])"
    r"|-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----.{1,10000}?-----END [A-Z ]{0,20}PRIVATE KEY-----",
    re.DOTALL,
)
_ASSIGNMENT = re.compile(
    r"(?P<kept>(?:api[_-]?key|passw\w*|secret|token)\w*[\"']?\s*[=:]\s*)(?P<secret>.+)", re.IGNORECASE
)

_FRAME = re.compile(r"-----(?:BEGIN|END) .*-----")  # the first and last line of a key, the same in all
_AMPERSAND, _HASH, _SEMICOLON = "(?:&|%(?:25)*26)", "(?:#|%(?:25)*23)", "(?:;|%(?:25)*3[Bb])"
_MAX_BACKSLASHES = 32  # for one character: JSON in JSON, five deep
_HTML_NAMES = {code: [name] for code, name in html.entities.codepoint2name.items()} | {0x27: ["apos"]}

_named_variables: set[str] = set()
_named_values: set[str] = set()

Replace = Callable[[str], str]


def hide(secret: str) -> str:
    return HIDDEN


# -- text
# ----------------------------------------------------------------------------------------------------------------


def redact(text: str, replace: Replace = hide) -> str:
    """The text without credentials of any kind. `replace` gives what stands in the place of one."""

    def replaced(match: re.Match[str]) -> str:
        kept, secret = match["kept"] or "", match["secret"] or match[0]
        return match[0] if _is_left_out(secret) else kept + replace(secret)

    text = redact_values(text, replace)
    if "://" in text:
        for pattern in _IN_URLS:
            text = pattern.sub(replaced, text)
    return _SHAPES.sub(replaced, text) if any(start in text for start in _STARTS) else text


def redact_values(text: str, replace: Replace = hide) -> str:
    """The text without values of named secrets, as they are and as JSON, Python, HTML and URLs spell them."""
    for search in _searches_for(_secret_values()):
        if search.core not in text:
            continue
        if search.pattern is None:
            text = text.replace(search.core, replace(search.core))
        else:
            text = search.pattern.sub(lambda match: replace(match[0]), text)
    return text


def redact_argument(text: str) -> str:
    """An argument of the command line, for messages: whatever a name like `api_key` is set to is left out."""
    return redact(_ASSIGNMENT.sub(lambda match: match["kept"] + HIDDEN, text))


def _secret_values() -> tuple[str, ...]:
    found = {value for value in _named_values if len(value) >= _MIN_NAMED_CHARACTERS}
    for name, value in os.environ.items():
        value = value.strip()
        if name in _named_variables:
            found |= {value} if len(value) >= _MIN_NAMED_CHARACTERS else set()
        elif len(value) >= _MIN_FOUND_CHARACTERS and _SECRET_VARIABLE.search(name) and not _is_path(value):
            found.add(value)
    return tuple(sorted(value for value in found if not _NUMBER.fullmatch(value)))


@lru_cache
def _is_path(value: str) -> bool:
    """A file with a secret in it: its name is none."""
    return value.startswith(("/", "~", "./")) and os.path.exists(os.path.expanduser(value))


@dataclass(frozen=True)
class _Search:
    """`core`: letters and digits of the secret, which every spelling keeps. `pattern` None: the secret has nothing
    else.
    """

    core: str
    pattern: re.Pattern[str] | None


@lru_cache(maxsize=16)
def _searches_for(values: tuple[str, ...]) -> list[_Search]:
    """The longest first: one secret may be a part of another."""
    wanted = {part for value in values for part in (value, *_lines_of(value))}
    return [_search_for(value) for value in sorted(wanted, key=lambda value: (-len(value), value))]


def _lines_of(value: str) -> list[str]:
    """What is printed line by line. A key in a variable often has `\\n` for its line ends."""
    ends = r"[\r\n]+|(?:\\[rn])+" if "-----BEGIN " in value else r"[\r\n]+"
    lines = [line.strip() for line in re.split(ends, value)]
    return [
        line
        for line in lines
        if line != value
        and len(line) >= _MIN_FOUND_CHARACTERS
        and not _FRAME.fullmatch(line)
        and not _NUMBER.fullmatch(line)
    ]


def _search_for(value: str) -> _Search:
    core = max(re.findall(r"[A-Za-z0-9]*", value), key=len)
    if core == value:
        return _Search(core, None)
    parts = re.findall(r"[A-Za-z0-9]+|\\+(?=[A-Za-z0-9]|$)|\\*(?:\s+|[^\\])", value)
    return _Search(core, re.compile("".join(map(_spelled, parts))))


def _spelled(part: str) -> str:
    """A pattern for a part of a secret under any number of the escapes of JSON, Python, HTML and URLs, also mixed.

    Each escape only adds backslashes, or writes a character as a number or a name, so depths need no patterns of their
    own.
    """
    if part.isascii() and part.isalnum():
        return part
    character = part.lstrip("\\")[:1]
    least = len(part) - len(part.lstrip("\\"))
    if not character:
        return _backslashes(least)
    forms, escaped = [re.escape(character), _numbered(character)], _escaped(character)
    if character.isspace():  # a message may be put on one line, and spaces in URLs are `+`
        forms = [r"\s", r"\+", *(_numbered(space) for space in " \t\r\n+")]
        escaped = ["[nrt]", *(form for space in " \t\r\n" for form in _escaped(space))]
    plain, numbers = "|".join(forms), "|".join(escaped)
    if least:  # also those that begin an escape
        return f"{_backslashes(least)}(?:{plain}|(?i:{numbers}))"
    either = f"(?:{_backslashes(0)}(?:{plain})|{_backslashes(1)}(?i:{numbers}))"
    return f"{either}+" if character.isspace() else either


def _backslashes(least: int) -> str:
    return rf"(?:\\|{_in_url(92)}|{_in_html(92)}){{{least},{max(least, 1) * _MAX_BACKSLASHES}}}+"


def _escaped(character: str) -> list[str]:
    """A character as JSON and Python write it after a backslash."""
    forms = [f"u0*{ord(character):x}", f"x{ord(character):02x}"]
    utf16 = character.encode("utf-16-be", "surrogatepass").hex()
    if len(utf16) > 4:
        forms.append(f"u{utf16[:4]}{_backslashes(1)}u{utf16[4:]}")
    utf8 = [f"x{byte:02x}" for byte in character.encode("utf-8", "surrogatepass")]
    return forms if character.isascii() else [*forms, _backslashes(1).join(utf8)]


def _numbered(character: str) -> str:
    """A character as URLs and HTML write it."""
    in_url = "".join(map(_in_url, character.encode("utf-8", "surrogatepass")))
    return f"{in_url}|{_in_html(ord(character))}"


def _in_url(byte: int) -> str:
    return f"%(?:25)*(?i:{byte:02x})"


def _in_html(code: int) -> str:
    names = "|".join(f"{_HASH}(?i:{number})" for number in (f"0*{code}", f"x0*{code:x}"))
    return f"{_AMPERSAND}(?:amp{_SEMICOLON})*(?:{'|'.join([names, *_HTML_NAMES.get(code, [])])}){_SEMICOLON}"


# -- settings
# ------------------------------------------------------------------------------------------------------------


def is_secret_key(name: str) -> bool:
    """Whether a setting, or a header, of this name holds a credential."""
    return _SECRET_KEY.search(name) is not None


def without_credentials(value: object, key: str = "", replace: Replace = hide) -> Any:
    """Settings, of any depth, without credentials: those in a text, and the whole text under a key such as
    `password`.
    """
    if isinstance(value, dict):
        return {name: without_credentials(inner, str(name), replace) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_credentials(inner, key, replace) for inner in value]
    if not isinstance(value, str) or not value:
        return value
    if is_secret_key(key):
        return value if _is_left_out(value) else replace(value)
    if match := _URL.match(value):  # a whole URL: its password may have characters that end a URL within a text
        user, colon, password = match["userinfo"].partition(":")
        secret = password if colon else user
        if secret and not _is_left_out(secret):
            value = f"{match['scheme']}{user if colon else ''}{colon}{replace(secret)}{value[match.end('userinfo') :]}"
    return redact(value, replace)


def _is_left_out(secret: str) -> bool:
    return secret == HIDDEN or REFERENCE.search(secret) is not None


def name_credentials(settings: object, key: str = "") -> None:
    """From now on the credentials in these settings, and the variables that they name as a key, are secrets."""
    without_credentials(settings, key, _name)
    if isinstance(settings, dict):
        for name, value in settings.items():
            if isinstance(value, str) and _NAMES_VARIABLE.search(str(name)):
                _named_variables.add(value)
            elif isinstance(value, dict):
                name_credentials(value)


def _name(secret: str) -> str:
    name_secret(secret)
    return HIDDEN


def name_secret(value: str) -> None:
    """From now on this text is a secret, also as it is without the escapes of a URL."""
    _named_values.update({value.strip(), unquote(value).strip()})


def same_but_for_credentials(key: str, one: object, other: object) -> bool:
    """Whether two settings are equal where a credential, hidden or not, and a reference to a variable are the same."""

    def plain(value: object) -> object:
        hidden = REFERENCE.sub(HIDDEN, value) if isinstance(value, str) else value
        return without_credentials(hidden, key)

    return bool(plain(one) == plain(other))


def shown_setting(key: str, value: object) -> str:
    """A value for an error message. It may be wrong in any way, so more is left out than elsewhere."""
    if value and is_secret_key(key):
        return HIDDEN
    userinfo = r"[^\s'\"]*@" if key.lower().endswith("url") else r"(?<=://)\S*@"
    return redact(re.sub(userinfo, f"{HIDDEN}@", repr(without_credentials(value, key))))


# -- URLs
# ----------------------------------------------------------------------------------------------------------------


def split_userinfo(url: str) -> tuple[str, str | None]:
    """The URL without userinfo, and the `Authorization` header that the userinfo stands for."""
    parts = urlsplit(url)
    userinfo, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, None
    user, _, password = userinfo.partition(":")
    code = base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
    name_secret(code)
    return urlunsplit(parts._replace(netloc=host)), f"Basic {code}"


def lacks_credential(url: str) -> bool:
    """Whether its credential was left out when it was written to a file."""
    return HIDDEN in urlsplit(url).netloc.rpartition("@")[0]
