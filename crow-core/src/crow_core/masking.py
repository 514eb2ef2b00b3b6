"""Find the secrets in settings and the environment, and mask them in values that are shown or stored.

Other texts in a conversation that look like secrets are not masked: requests have to repeat them byte by byte.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, cast
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import msgspec

MASK = "[secret]"

MIN_SECRET_LENGTH = 8
"""The least characters of a secret: a shorter text occurs inside other words too often."""

MIN_PARTIAL = 4
"""The least characters of the beginning of a secret that a text is cut for."""

SECRET_NAMES = re.compile(r"((api|access|secret)[_-]?key|token|secret|password|passwd|passphrase|authorization)$", re.I)
"""Matches names of settings whose values are always secrets."""
LIKELY_SECRET_NAMES = re.compile(r"key|token|secret|passw|passphrase|credential|cookie|auth(?!or)|authori[sz]", re.I)
"""Matches names of settings whose values are secrets unless they are ordinary."""
PRIVATE_TABLES = ("env", "headers")
"""Tables whose values are secrets under any name unless they are ordinary."""

WORD = r"(?:[^\W\d_]{1,20}\d{0,3}|\d+(?:T\d+)?[^\W\d_]{0,2})"
ORDINARY = re.compile(
    rf"[\W_]*(?:{WORD}(?:[\W_]+{WORD})*[\W_]*)?"  # words, numbers, and versions, hosts, dates made of them
    r"|(?:~|\.{1,2}|[A-Za-z]:)?[/\\][^\s+=]*"  # paths
)
"""Matches values that are not secrets."""
PLACEHOLDERS = frozenset(
    {"anything", "changeme", "lm-studio", "llama.cpp", "localhost", "no-key-required", "not-needed", "password"}
    | {"placeholder", "postgres", "sk-no-key-required", "undefined"}
)
"""Values that people set where a secret is required but not needed."""
AUTH_SCHEME = re.compile(r"(basic|bearer|digest|token|apikey)\s+", re.I)
"""Matches the scheme of an `Authorization` header."""
URL = re.compile(r"[a-z][a-z0-9+.-]*://\S+", re.I)
FLAG = re.compile(r"(--?[\w-]+)=(\S+)")
"""Matches a command-line option with its value."""


def find_secrets(*settings: msgspec.Struct | Mapping[str, Any]) -> frozenset[str]:
    """Return the secrets in settings, at any depth."""
    tables = (msgspec.to_builtins(one if isinstance(one, msgspec.Struct) else dict(one)) for one in settings)
    return frozenset(secret for table in tables for secret in find_in_value(table, "", table=""))


def find_in_value(value: Any, name: str, *, table: str) -> Iterator[str]:
    """Yield the secrets in a value; `name` is its name, `table` the name of the table that holds it."""
    match value:
        case str():
            flag = FLAG.fullmatch(value)
            text, name = (flag[2], flag[1]) if flag else (value, name)
            yield from find_secrets_in_text(text, name, is_private=table in PRIVATE_TABLES)
        case {"name": str(own), "value": str(inner), **more} if not more:  # ACP's form of a variable or a header
            yield from find_secrets_in_text(inner, own, is_private=name in PRIVATE_TABLES)
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


def find_secrets_in_text(text: str, name: str, *, is_private: bool = False) -> Iterator[str]:
    """Yield the secrets in one setting: all of it, or the secret parts of a URL."""
    text = AUTH_SCHEME.sub("", text.strip(), count=1)
    if URL.fullmatch(text):
        yield from find_secrets_in_url(text)
        return
    if len(text) < MIN_SECRET_LENGTH or text.lower() in PLACEHOLDERS:
        return
    is_likely = is_private or LIKELY_SECRET_NAMES.search(name)
    if SECRET_NAMES.search(name) or (is_likely and not ORDINARY.fullmatch(text)):
        yield text
        lines = (line for line in text.splitlines() if len(line) > MIN_SECRET_LENGTH)
        yield from (line for line in lines if not ORDINARY.fullmatch(line))


def find_secrets_in_url(url: str) -> Iterator[str]:
    """Yield the password of a URL, and the keys in its path and query."""
    try:
        parts = urlsplit(url)
        user, password = parts.username or "", parts.password or ""
    except ValueError:
        return
    if password != user:
        yield from find_secrets_in_text(password, "password")
        yield from find_secrets_in_text(unquote(password), "password")
    for piece in (user, *parts.path.split("/")):
        if len(piece) >= 2 * MIN_SECRET_LENGTH and not ORDINARY.fullmatch(piece):
            yield piece
    for name, value in parse_qsl(parts.query):
        yield from find_secrets_in_text(value, name)


def mask(value: Any, secrets: Collection[str]) -> Any:
    """Replace every secret in a JSON value by the mask, also in texts that are JSON themselves."""
    spellings: set[str] = set()
    for secret in secrets:
        spellings |= {secret, quote(secret, safe=""), secret.replace("/", "\\/")}  # the last as in PHP's JSON
        spellings |= {json.dumps(secret, ensure_ascii=is_ascii)[1:-1] for is_ascii in (True, False)}
    return replace_secrets(value, sorted(spellings, key=len, reverse=True))


def drop_partial_secret(text: str, secrets: Collection[str]) -> str:
    """Drop the end of a text that is still arriving where it may be the beginning of a secret."""
    for secret in secrets:
        for length in range(min(len(secret) - 1, len(text)), MIN_PARTIAL - 1, -1):
            if text.endswith(secret[:length]):
                return text[:-length]
    return text


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
