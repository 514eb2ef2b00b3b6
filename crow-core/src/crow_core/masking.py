"""What crow itself was given and must show and write nowhere: which values that is, and the mask that stands for them.

What else looks like a secret in a conversation stays as it is: the next request has to be the same to the byte.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, cast
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

MASK = "[secret]"

SHORTEST = 8
"""Characters of a secret: something shorter stands in too many other words."""

CERTAIN = re.compile(r"((api|access|secret)[_-]?key|token|secret|password|passwd|passphrase|authorization)$", re.I)
"""A setting of such a name holds a secret, whatever it looks like."""
LIKELY = re.compile(r"key|token|secret|passw|passphrase|credential|cookie|auth(?!or)|authori[sz]", re.I)
"""A setting of such a name holds a secret, unless it is ordinary."""
GIVEN = ("env", "headers")
"""What stands in these tables is for one server alone: secret whatever its name, unless it is ordinary."""

PIECE = r"(?:[^\W\d_]{1,20}\d{0,3}|\d+(?:T\d+)?[^\W\d_]{0,2})"
ORDINARY = re.compile(
    rf"[\W_]*(?:{PIECE}(?:[\W_]+{PIECE})*[\W_]*)?"  # words, numbers and what is made of them: versions, hosts, dates
    r"|(?:~|\.{1,2}|[A-Za-z]:)?[/\\][^\s+=]*"  # paths
)
PLACEHOLDERS = frozenset(
    {"anything", "changeme", "lm-studio", "llama.cpp", "localhost", "no-key-required", "not-needed", "password"}
    | {"placeholder", "postgres", "sk-no-key-required", "undefined"}
)
"""What people write where a secret is asked for and none is needed."""
SCHEME = re.compile(r"(basic|bearer|digest|token|apikey)\s+", re.I)
"""Of an `Authorization` header."""
ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://\S+", re.I)
FLAG = re.compile(r"(--?[\w-]+)=(\S+)")


def find_secrets(*settings: msgspec.Struct | Mapping[str, Any]) -> frozenset[str]:
    """The secrets in settings: whatever has a name there, however deep it is nested."""
    plain = (msgspec.to_builtins(given if isinstance(given, msgspec.Struct) else dict(given)) for given in settings)
    return frozenset(secret for given in plain for secret in find_in_value(given, "", table=""))


def find_in_value(value: Any, name: str, *, table: str) -> Iterator[str]:
    """The secrets in a value; `name` is its own, `table` that of what it stands in."""
    match value:
        case str():
            flag = FLAG.fullmatch(value)
            yield from find_secrets_in_text(flag[2] if flag else value, flag[1] if flag else name, given=table in GIVEN)
        case {"name": str(own), "value": str(inner), **more} if not more:  # as ACP lists variables and headers
            yield from find_secrets_in_text(inner, own, given=name in GIVEN)
        case dict():
            for own, inner in cast(dict[str, Any], value).items():
                yield from find_in_value(inner, own, table=name)
        case list():
            items = cast(list[Any], value)
            for before, inner in zip(["", *items], items, strict=False):
                flag = before if isinstance(before, str) and before.startswith("-") else name  # "--token", "…"
                yield from find_in_value(inner, flag, table=table)
        case _:
            pass


def find_secrets_in_text(text: str, name: str, *, given: bool = False) -> Iterator[str]:
    """The secrets in one setting: all of it, or of an address only what nobody else may know."""
    text = SCHEME.sub("", text.strip(), count=1)
    if ADDRESS.fullmatch(text):
        yield from find_secrets_in_url(text)
    elif len(text) < SHORTEST or text.lower() in PLACEHOLDERS:
        return
    elif CERTAIN.search(name) or ((given or LIKELY.search(name)) and not ORDINARY.fullmatch(text)):
        yield text
        yield from (line for line in text.splitlines() if len(line) > SHORTEST and not ORDINARY.fullmatch(line))


def find_secrets_in_url(url: str) -> Iterator[str]:
    """The password of an address, and what in its path and its query is a key."""
    try:
        parts = urlsplit(url)
        user, password = parts.username or "", parts.password or ""
    except ValueError:
        return
    if password != user:
        yield from find_secrets_in_text(password, "password")
        yield from find_secrets_in_text(unquote(password), "password")
    for piece in (user, *parts.path.split("/")):
        if len(piece) >= 2 * SHORTEST and not ORDINARY.fullmatch(piece):
            yield piece
    for name, value in parse_qsl(parts.query):
        yield from find_secrets_in_text(value, name)


def mask(value: Any, secrets: Collection[str]) -> Any:
    """A JSON value with the mask in place of every secret, also where a text of it is JSON itself."""
    spelled = {text for secret in secrets for text in (secret, json.dumps(secret)[1:-1])}
    spelled |= {json.dumps(secret, ensure_ascii=False)[1:-1] for secret in secrets}
    return replace_secrets(value, sorted(spelled, key=len, reverse=True))


def replace_secrets(value: Any, secrets: Sequence[str]) -> Any:
    match value:
        case str():
            for secret in secrets:
                value = value.replace(secret, MASK)
            return value
        case dict():
            items = cast(dict[str, Any], value).items()
            return {replace_secrets(name, secrets): replace_secrets(inner, secrets) for name, inner in items}
        case list():
            return [replace_secrets(inner, secrets) for inner in cast(list[Any], value)]
        case _:
            return value
