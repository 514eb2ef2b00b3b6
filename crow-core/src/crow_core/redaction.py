"""Find likely secrets in texts: to mask them before a session is given away, and to know that a session has read some.

Some secrets may remain: look before you publish.

A secret is recognised by its form (a key's prefix, the frame of a private key) or by the name it is assigned to
(`password = …`). Digests and ids without such a name are not masked.
"""

import binascii
import re
from base64 import b64decode
from collections.abc import Mapping
from itertools import islice
from typing import Any, cast

import msgspec

from crow_core.masking import PLACEHOLDERS
from crow_core.text import decode_json

MASK = "[redacted]"

IMAGE = re.compile(r"data:[\w/+.-]{1,100};base64,[A-Za-z0-9+/=]*$")
"""Base64 data, which may look like any secret by chance."""

PRIVATE_KEY = re.compile(
    r"(-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----)"
    r"(?:[\w+/=:,.\s\\|()-]{1,20000}?(?=-----END )|(?:(?:\s|\\[nr]){0,4}[A-Za-z0-9+/=]{32,}){1,400})"
)
"""A private key up to its end, also with line numbers or diff signs; without an end, as many long lines as follow."""

PREFIXED = re.compile(
    r"\b(?:"
    r"(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}(?![A-Za-z0-9])"  # AWS
    r"|(?:gh[pousr]|npm|hf|gsk|r8|dop_v1|shpat|shpss|glsa|lin_api|dckr_pat|sntrys|fw|rpa|whsec)_[A-Za-z0-9]{20,}"
    r"|github_pat_\w{22,}|(?:[rs]k|pk)_(?:live|test)_[A-Za-z0-9]{16,}"  # Stripe
    r"|gl(?:pat|dt|rt|cbt|ptt|ft|soat|agent|oas|imt)-[\w-]{20,}"  # GitLab
    r"|xox[a-z]-[\w-]{10,}|xapp-\d-[\w-]{10,}"  # Slack
    r"|AIza[\w-]{35}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,}"  # Google
    r"|SG\.[\w-]{16,}\.[\w-]{16,}|pypi-AgE[\w-]{40,}|\d{8,10}:AA[\w-]{32,}"  # SendGrid, PyPI, Telegram
    r"|(?:xai|pplx|nvapi|tvly|csk|jina)-[\w-]{20,}|AGE-SECRET-KEY-1[A-Z0-9]{20,}"
    r"|eyJ[\w-]{8,}\.(?:eyJ[\w-]{8,}\.[\w-]*|[\w-]*\.[\w-]{10,}\.[\w-]+\.[\w-]+)"  # JSON web tokens
    r")"
)

SK = re.compile(r"\bsk-(?!ecdsa|ssh)[\w-]{17,}")
"""Keys of OpenAI, Anthropic, OpenRouter, DeepSeek and others. CSS class names match, too, but hold few digits."""

WEBHOOK = re.compile(r"(hooks\.slack\.com/(?:services|workflows)/|discord(?:app)?\.com/api/webhooks/)[\w/-]{20,}")

REFERENCE = r"(?!\[redacted|[$<{%*~]|\.\.\.|/(?![\w+/]*=))"
"""Lookahead that excludes variables, placeholders and paths, which are not secrets themselves."""

URL = re.compile(
    rf"([a-z][a-z0-9+.-]{{1,20}}://[^\s/:@\"'<>`]{{0,200}}:){REFERENCE}[^\s/@\"'<>`]{{1,500}}(?=@[\w.\[-])", re.I
)

QUERY = re.compile(
    r"([?&](?:access_token|refresh_token|id_token|auth|token|api_?key|key|sig|signature|x-amz-signature|password|secret)=)"
    rf"{REFERENCE}([^&\s\"'#\\<>`]{{8,}})",
    re.I,
)

HEADER = re.compile(
    r"(authorization\\*[\"']?\s{0,3}[:=]\s{0,3}\\*[\"']?(?:bearer|basic|token|digest|apikey)?\s{0,3}|\bbearer\s{1,3})"
    rf"{REFERENCE}([\w.~+/=-]{{8,}})",
    re.I,
)

COOKIE = re.compile(rf"(\b(?:set-)?cookie:[ \t]*[\w.-]+=){REFERENCE}([^;\s\"'\\]{{12,}})", re.I)

NAME = (
    r"(?<![:/])(?:passwords?|passwd|passphrase|pwd|credentials?|secrets?|auth|token|api[_-]?key"
    r"|(?:access|account|auth|encryption|master|private|secret|shared|signing|storage)[_-]?key)"
)

ASSIGNED = re.compile(
    rf"({NAME}(?![\w-])\\*[\"'`]?\s{{0,3}}(?:=>|:=|=|:)\s{{0,3}})"
    rf"(?:(?P<quote>\\*[\"'`]){REFERENCE}(?P<quoted>(?:(?!(?P=quote))(?:\\.|[^\\\s])){{4,9999}})(?=(?P=quote)|\Z)"
    rf"|{REFERENCE}(?P<bare>[^\s\"'`,;|<>(){{}}\[\]\\]{{6,9999}}+)(?![(\[{{]))",
    re.I,
)

FLAG = re.compile(
    rf"((?:--[\w-]{{0,30}}{NAME}|\blogin\s+\S{{1,200}}\s+password)[ \t]+)(?!-){REFERENCE}([^\s\"'`\\]{{6,}})", re.I
)

VARIABLE = re.compile(
    r"(?<![\w$.])[\"']?(?:[A-Z0-9]+_)*"
    r"(?:[A-Z0-9]*KEY(?:_ID)?|TOKEN|SECRET(?:_[A-Z]+)*|PASS(?:WORD|WD|PHRASE)?|PWD|CREDENTIALS?|PAT|DSN)"
    r"(?:=[\"']?|[\"']:\s*[\"'])(?![$<{%*~(]|\.\.\.|\d{1,5}\b|/(?![\w+/]*=))([^\s\"'$]{4,})"
)
"""A variable of an environment that holds a secret by its name, as env, .env files and JSON write it."""
TEXT_LIMIT = 500_000
"""Characters of a text in which a secret is looked for."""
BASE64 = re.compile(r"(?<![\w+/-])[A-Za-z0-9+/]{16,}(?:\r?\n[A-Za-z0-9+/]+)*={0,2}(?![\w+/-])")
ENCODED_LIMIT = 20
"""Texts in base64 that are decoded."""


def redact_text(text: str) -> str:
    """Return a text with its secrets masked. Redacting twice gives the same result."""
    if IMAGE.match(text):
        return text
    text = PRIVATE_KEY.sub(rf"\1\n{MASK}\n", text) if "PRIVATE KEY" in text else text
    text = PREFIXED.sub(MASK, text)
    text = SK.sub(lambda found: MASK if is_random(found[0]) else found[0], text)
    text = WEBHOOK.sub(rf"\1{MASK}", text)
    text = URL.sub(rf"\1{MASK}", text)
    for pattern in (QUERY, HEADER, COOKIE, FLAG):
        text = pattern.sub(lambda found: f"{found[1]}{MASK}" if is_random(found[2]) else found[0], text)
    return ASSIGNED.sub(mask_assignment, text)


def holds_secret(text: str) -> bool:
    """Test whether a text holds a likely secret, also as the variable of an environment, or encoded in base64."""
    text = text[:TEXT_LIMIT]
    if has_plain_secret(text):
        return True
    encoded = (str(found[0]) for found in islice(BASE64.finditer(text), ENCODED_LIMIT))
    return any(has_plain_secret(decode(each)) for each in encoded)


def has_plain_secret(text: str) -> bool:
    """Test whether a text holds a likely secret that can be read in it."""
    return any(found[1].lower() not in PLACEHOLDERS for found in VARIABLE.finditer(text)) or redact_text(text) != text


def decode(encoded: str) -> str:
    """Decode base64; "" if it is none, or holds no text."""
    try:
        return b64decode(re.sub(r"\s", "", encoded) + "==").decode()
    except (binascii.Error, ValueError):
        return ""


def redact_data(value: Any, name: str = "") -> Any:
    """Return JSON data with the secrets in its strings masked; `name` is the key of the value. Keys are not changed."""
    match value:
        case str(text):
            if name == "arguments" and (arguments := parse_object(text)) is not None:
                masked = redact_data(arguments)
                return text if masked == arguments else msgspec.json.encode(masked).decode()
            return MASK if name and is_secret(name, text) else redact_text(text)
        case dict():
            items = cast(Mapping[str, Any], value).items()
            return {key: redact_data(inner, key) for key, inner in items}
        case list():
            return [redact_data(inner, name) for inner in cast(list[Any], value)]
        case _:
            return value


def parse_object(text: str) -> dict[str, Any] | None:
    """Parse a JSON object; None if the text is something else."""
    try:
        parsed = decode_json(text)
    except ValueError:
        return None
    return cast(dict[str, Any], parsed) if isinstance(parsed, dict) else None


def mask_assignment(found: re.Match[str]) -> str:
    """Return the replacement for a name and its value."""
    quoted, bare = found["quoted"], found["bare"]
    if quoted is not None:
        masked = is_literal(found[1], quoted)
        return f"{found[1]}{found['quote']}{MASK}" if masked else found[0]
    env = re.match(r"[A-Z_]+=$", found[1])  # as in a .env file, where a value is never a variable's name
    return f"{found[1]}{MASK}" if env or is_value(bare) else found[0]


def is_secret(name: str, text: str) -> bool:
    """Test whether a string is a secret by the name of its key."""
    found = re.search(rf"{NAME}$", name, re.I)
    return found is not None and re.fullmatch(rf"{REFERENCE}\S{{4,9999}}", text) is not None and is_literal(name, text)


def is_literal(name: str, text: str) -> bool:
    """Test whether a quoted text is a secret rather than a word about one. A password need not look random."""
    if re.search(r"pass|pwd", name, re.I):
        return re.fullmatch(rf"\W*{NAME}\W*|str(ing)?|text|true|false|none|null", text, re.I) is None
    return is_random(text)


def is_value(text: str) -> bool:
    """Test whether an unquoted text is a secret rather than the name of a variable."""
    is_name = re.fullmatch(r"[a-z_]+\d?|[A-Z_]+\d?|\w+(\.\w+)+|[A-Za-z]+", text.rstrip(".:!?"))
    return is_name is None and any(map(str.isdigit, text)) and any(map(str.isalpha, text))


def is_random(text: str) -> bool:
    """Test whether a text looks random: digits among letters, or both cases and digits."""
    digits = sum(map(str.isdigit, text))
    mixed = text != text.lower() and text != text.upper()
    return len(text) >= 8 and (digits >= 3 or (digits >= 1 and mixed))
