"""Exports are complete, harmless and free of secrets."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import crow_core
import pytest
from crow_core.messages.message import Message
from crow_core.redaction import MASK, redact_data, redact_text
from crow_core.session.store import Record, Summary
from crow_persistence.export import Format, export
from crow_persistence.export.transcript import Transcript
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CALMLY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
KEY = "Zq3vT9xLm2Rk8WpYc5Hd7NbJ4sGf6Ua1"
"""An example key: 32 letters and digits."""
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"
PEM = f"-----BEGIN OPENSSH PRIVATE KEY-----\n{KEY * 2}\n{KEY}==\n-----END OPENSSH PRIVATE KEY-----"
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAAB"
    "JRU5ErkJggg=="
)
BEEP = "UklGRiQAAABXQVZFZm10IBAAAAABAAEAQB8AAIA+AAACABAAZGF0YQAAAAA="
FORMATS: list[Format] = ["markdown", "jsonl", "html", "atif"]

SECRETS = [
    ("AKIAIOSFODNN7EXAMPLE", "AKIAIOSFODNN7EXAMPLE"),
    ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"),
    (f"ghp_{KEY}abcd", KEY),
    (f"github_pat_11ABCDEFG0{KEY}", KEY),
    (f"glpat-{KEY[:20]}", KEY[:20]),
    (f"sk-{KEY}", KEY),
    (f"sk-proj-{KEY}_x-{KEY}", KEY),
    (f"sk-ant-api03-{KEY}-{KEY}AA", KEY),
    (f"xoxb-123456789012-123456789012-{KEY}", KEY),
    (f"https://hooks.slack.com/services/T00000000/B00000000/{KEY[:24]}", KEY[:24]),
    (f"AIzaSy{KEY}x", KEY),
    (f"sk_live_{KEY}", KEY),
    (f"npm_{KEY}abcd", KEY),
    (f"123456789:AA{KEY}x", KEY),
    (JWT, JWT),
    (PEM, KEY),
    (PEM.replace("\n", "\\n"), KEY),
    ("\n".join(f"{n:6}\t{line}" for n, line in enumerate(PEM.splitlines())), KEY),
    (PEM.partition("==")[0], KEY),
    (f"Authorization: Bearer {KEY}", KEY),
    (f"curl -H 'authorization: token {KEY}' https://example.org", KEY),
    ("Authorization: Basic dXNlcjpwYXNzd29yZDE=", "dXNlcjpwYXNzd29yZDE="),
    (f"Set-Cookie: session={KEY}; Path=/", KEY),
    ("postgresql://me:s3cr%40t@db:5432/x", "s3cr%40t"),
    ("redis://:pa55word@localhost", "pa55word"),
    (f"https://example.org/?a=1&token={KEY}&b=2", KEY),
    ("password=hunter22", "hunter22"),
    ('password = "correcthorse"', "correcthorse"),
    ('{"password": "hunter2"}', "hunter2"),
    (r"{\"password\": \"hunter2\"}", "hunter2"),
    ("DB_PASSWORD=correcthorse", "correcthorse"),
    ("POSTGRES_PASSWORD: s3cretpass", "s3cretpass"),
    ("spring.datasource.password=Tr0ub4dor&3", "Tr0ub4dor&3"),
    ("machine example.org login me password Tr0ub4dor", "Tr0ub4dor"),
    (f"export OPENAI_API_KEY={KEY}", KEY),
    (f"client_secret: {KEY}", KEY),
    (f"api_key='{KEY}'", KEY),
    (f"tool --api-key {KEY} run", KEY),
    (f"//registry.npmjs.org/:_authToken={KEY}", KEY),
    (f'"auth": "{KEY}"', KEY),
    (f"AccountKey={KEY * 2}==;", KEY),
]

HARMLESS = [
    "token = tokenizer.next()",
    "def login(user: str, password: str, token: Token | None = None) -> None:",
    "api_key=self.api_key",
    "secret_key = os.environ['SECRET_KEY']",
    "password = getpass()",
    "secret = secrets.token_hex(16)",
    "max_tokens=4096, tokens: 123456",
    'headers["Authorization"] = f"Bearer {key}"',
    '"Authorization": "Bearer " + token',
    "Authorization: Bearer $TOKEN, or Bearer <token>",
    "api_key: ${API_KEY}, password = {{ password }}, password: ****",
    "https://user:${PASSWORD}@host and git@github.com:a/b.git and http://localhost:8080/a@b",
    "d41d8cd98f00b204e9800998ecf8427e 550e8400-e29b-41d4-a716-446655440000",
    'hash = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"',
    "commit 343d9df0b1c2d3e4f5a6b7c8d9e0f1a2b3c4d5e6",
    "PWD=/root/project1 OLDPWD=/tmp/x1",
    "<input type=\"password\" name='password' placeholder='Password'>",
    "class sk-estimator-id-1 sk-toggleable__label-arrow sk-learn-something-nice-2 sk-ecdsa-sha2-nistp256@openssh.com",
    "The password is stored in a file. Password:",
    "-----BEGIN PUBLIC KEY-----\nMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE\n-----END PUBLIC KEY-----",
    "a PRIVATE KEY begins with -----BEGIN PRIVATE KEY----- and then goes on",
]


@pytest.mark.parametrize(("text", "secret"), SECRETS)
def test_likely_secret_is_masked(text: str, secret: str):
    masked = redact_text(text)
    assert secret not in masked
    assert MASK in masked
    assert redact_text(masked) == masked


@pytest.mark.parametrize("text", HARMLESS)
def test_text_about_secrets_is_not_masked(text: str):
    assert redact_text(text) == text


def test_source_code_is_not_masked():
    for path in Path(crow_core.__file__).parent.rglob("*.py"):
        text = path.read_text()
        assert redact_text(text) == text, path


noise = st.text(st.characters() | st.sampled_from("\"'\\\n`=: -_./@{}[]()&?+"), max_size=40)


@CALMLY
@given(noise, st.sampled_from(SECRETS), noise)
def test_secret_is_masked_in_any_context(before: str, example: tuple[str, str], after: str):
    text, secret = example
    masked = redact_text(f"{before}\n{text}\n{after}")
    assert secret not in masked
    assert redact_text(masked) == masked


@CALMLY
@given(st.recursive(noise | st.integers(), lambda some: st.lists(some) | st.dictionaries(noise, some)), noise)
def test_masking_keeps_the_structure_of_data_and_the_lines_of_text(value: Any, text: str):
    def shape(value: Any) -> Any:
        match value:
            case dict():
                return {key: shape(inner) for key, inner in value.items()}
            case list():
                return [shape(inner) for inner in value]
            case _:
                return type(value)

    assert shape(redact_data(value)) == shape(value)
    if "PRIVATE KEY" not in text:
        assert redact_text(text).count("\n") == text.count("\n")


def test_masked_arguments_are_json_and_keys_mark_secrets():
    arguments = json.dumps({"command": 'login "a\\b"', "options": {"password": 'a"b\\', "token": KEY, "size": 3}})
    masked = json.loads(redact_data({"arguments": arguments})["arguments"])
    assert masked == {"command": 'login "a\\b"', "options": {"password": MASK, "token": MASK, "size": 3}}
    assert redact_data({"arguments": '{ "a": 1 }'}) == {"arguments": '{ "a": 1 }'}
    assert redact_data({"arguments": f'{{"token": "{KEY}'}) != {"arguments": f'{{"token": "{KEY}'}
    assert redact_data({"image_url": {"url": PIXEL}}) == {"image_url": {"url": PIXEL}}


def call(id: str, name: str, arguments: str) -> Any:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def make_transcript(
    *log: Message, title: str = "A title", calls: list[dict[str, Any]] | None = None, **more: Any
) -> Transcript:
    for n, entry in enumerate(log):
        entry.setdefault("crow", {}).setdefault("id", f"{n:032x}")
    summary = Summary("5e55", "/home/me/project", ["/home/me/project"], title, 1_795_000_000_000, 1_795_000_060_000)
    record = Record("5e55", list(log), **{"options": {"model": "m"}, "system": "You are a crow.", **more})
    return Transcript(summary, record, calls or [], {f"{0:032x}": 1_795_000_000_000})


def asked(id: str, **more: Any) -> dict[str, Any]:
    """Return a model call, as from `model_call_to_dict`."""
    numbers = {"input": 100, "output": 10, "cached": 60, "cost": 0.5, "currency": "USD", "first": 5.123, "total": 9.0}
    words = {"purpose": "turn", "model": "m", "crow": "0.1.0", "stop_reason": "stop", "error": None, "usage": {"x": 1}}
    return {"id": id, "started": 1_795_000_001_000, **numbers, **words, **more}


def make_full_transcript() -> Transcript:
    """Return a transcript with every kind of entry."""
    change = {"path": "/home/me/project/a.py", "old": "one\ntwo\n", "new": "one\n2\n", "before": "0", "after": "1"}
    return make_transcript(
        {"crow": {"kind": "tools", "schemas": [{"type": "function", "function": {"name": "look"}}]}},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": PIXEL}}],
        },
        {"crow": {"kind": "render", "purpose": "system", "prompt": "system", "text": "You are a crow."}},
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": "I look.",
            "tool_calls": [call("a", "look", '{"path": "a.py"}'), call("b", "look", "{"), call("c", "look", "{}")],
            "crow": {"id": "reply1"},
        },
        {"crow": {"kind": "decision", "call": "a", "tool": "look", "is": "allow", "by": "the user"}},
        {"role": "tool", "tool_call_id": "a", "content": "Seen.", "crow": {"changes": [change]}},
        {"role": "tool", "tool_call_id": "b", "content": "No JSON.", "crow": {"failed": True}},
        {"crow": {"kind": "option", "option": "model", "value": "other"}},
        {"role": "assistant", "content": "It is", "crow": {"id": "reply2", "cut": "interrupted"}},
        calls=[
            asked("reply1"),
            asked("title1", purpose="title", cost=0.25),
            asked("reply2", model="n", currency="EUR"),
        ],
        tools=[{"type": "function", "function": {"name": "look"}}],
    )


def test_json_lines_contain_the_log():
    transcript = make_full_transcript()
    head, *lines = [json.loads(line) for line in export(transcript, "jsonl").text.splitlines()]
    assert lines[: len(transcript.record.log)] == transcript.record.log
    assert [line["crow"]["id"] for line in lines[len(transcript.record.log) :]] == ["reply1", "title1", "reply2"]
    assert head["crow"] == {
        "kind": "session",
        "version": 1,
        "id": "5e55",
        "cwd": "/home/me/project",
        "roots": ["/home/me/project"],
        "title": "A title",
        "created": 1_795_000_000_000,
        "updated": 1_795_000_060_000,
        "options": {"model": "m"},
        "damage": "",
    }


def test_markdown_shows_messages_and_tool_calls():
    assert export(make_full_transcript(), "markdown").text == (Path(__file__).parent / "export.md").read_text()


TRAJECTORY: dict[str, Any] = {
    "schema_version": str,
    "session_id": str,
    "agent": {"name": str, "version": str, "model_name?": str, "tool_definitions?": list, "extra?": dict},
    "steps": [
        {
            "step_id": int,
            "timestamp?": str,
            "source": str,
            "model_name?": str,
            "message": (str, list),
            "reasoning_content?": str,
            "tool_calls?": [{"tool_call_id": str, "function_name": str, "arguments": dict}],
            "observation?": {"results": [{"source_call_id?": str, "content?": (str, list), "extra?": dict}]},
            "metrics?": {
                "prompt_tokens?": int,
                "completion_tokens?": int,
                "cached_tokens?": int,
                "cost_usd?": float,
                "extra?": dict,
            },
            "llm_call_count?": int,
            "extra?": dict,
        }
    ],
    "notes?": str,
    "final_metrics?": {
        "total_prompt_tokens?": int,
        "total_completion_tokens?": int,
        "total_cached_tokens?": int,
        "total_cost_usd?": float,
        "total_steps?": int,
    },
    "extra?": dict,
}
"""The part of ATIF-v1.8 (RFC 0001 of Harbor) that crow writes: no other keys, and no nulls."""
AGENT_ONLY = {"model_name", "reasoning_content", "tool_calls", "metrics"}


def fits(value: Any, form: Any, where: str = "") -> None:
    match form:
        case dict():
            allowed = {key.removesuffix("?"): inner for key, inner in form.items()}
            assert value.keys() <= allowed.keys(), where
            assert value.keys() >= {key for key in form if not key.endswith("?")}, where
            for key, inner in value.items():
                fits(inner, allowed[key], f"{where}.{key}")
        case [inner]:
            for item in value:
                fits(item, inner, where)
        case _:
            assert isinstance(value, form), where


def is_trajectory(trajectory: dict[str, Any], files: dict[str, bytes]) -> None:
    """Check that a trajectory follows the format, including rules beyond the types."""
    fits(trajectory, TRAJECTORY)
    assert trajectory["schema_version"] == "ATIF-v1.8"
    assert [step["step_id"] for step in trajectory["steps"]] == list(range(1, len(trajectory["steps"]) + 1)) != []
    for step in trajectory["steps"]:
        assert step["source"] in ("system", "user", "agent")
        assert step["source"] == "agent" or not AGENT_ONLY & step.keys()
        results = step.get("observation", {}).get("results", [])
        known = {use["tool_call_id"] for use in step.get("tool_calls", [])}
        assert {result["source_call_id"] for result in results} <= known
        for content in [step["message"], *(result["content"] for result in results)]:
            for part in content if isinstance(content, list) else []:
                if part["type"] == "image":
                    assert part["source"]["path"] in files
                    fits(part, {"type": str, "source": {"media_type": str, "path": str}})
                else:
                    fits(part, {"type": str, "text": str})


def test_trajectory_follows_the_format():
    transcript = export(make_full_transcript(), "atif")
    trajectory = json.loads(transcript.text)
    is_trajectory(trajectory, transcript.files)
    system, user, first, second = trajectory["steps"]
    assert (system["source"], system["message"]) == ("system", "You are a crow.")
    [path] = transcript.files
    assert transcript.files[path].startswith(b"\x89PNG")
    image = {"type": "image", "source": {"media_type": "image/png", "path": path}}
    assert user["message"] == [{"type": "text", "text": "Look:"}, image]
    uses = [(use["tool_call_id"], use["arguments"]) for use in first["tool_calls"]]
    assert uses == [("a", {"path": "a.py"}), ("b", {"invalid_json": "{"}), ("c", {})]
    assert first["observation"]["results"] == [
        {"source_call_id": "a", "content": "Seen."},
        {"source_call_id": "b", "content": "No JSON.", "extra": {"failed": True}},
    ]
    extra = {"first_ms": 5.1, "total_ms": 9.0, "stop_reason": "stop", "usage": {"x": 1}}
    assert first["metrics"] == {
        "prompt_tokens": 100,
        "completion_tokens": 10,
        "cached_tokens": 60,
        "cost_usd": 0.5,
        "extra": extra,
    }
    assert second["metrics"]["extra"] == {**extra, "cost": 0.5, "currency": "EUR"}
    assert (second["model_name"], second["extra"]) == ("n", {"interrupted": "interrupted"})
    assert second["timestamp"] == "2026-11-18T11:06:41.000Z"
    assert trajectory["final_metrics"] == {
        "total_prompt_tokens": 200,
        "total_completion_tokens": 20,
        "total_cached_tokens": 120,
        "total_cost_usd": 0.75,
        "total_steps": 4,
    }
    assert trajectory["agent"]["tool_definitions"] == [{"type": "function", "function": {"name": "look"}}]


class Page(HTMLParser):
    """The elements and texts of an HTML page."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.addresses: list[str] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


TAGS = {
    *("html", "head", "meta", "title", "style", "body", "h1", "dl", "dt", "dd", "article", "header", "a", "details"),
    *("summary", "div", "pre", "p", "b", "span", "img", "audio"),
}
ATTRIBUTES = {"lang", "charset", "name", "content", "http-equiv", "class", "id", "href", "src", "alt", "controls"}


def is_harmless(page: str) -> Page:
    """Check that a page is well-formed, runs nothing and loads nothing. Return it."""
    found = Page(page)
    assert not found.open
    assert found.tags <= TAGS
    assert found.attributes <= ATTRIBUTES
    harmless = r"#|data:(image/(png|jpeg|gif|webp)|audio/wav);base64,"
    assert all(re.match(harmless, address) for address in found.addresses)
    assert "@import" not in page
    assert "url(" not in page.partition("</style>")[0]
    return found


def test_page_shows_everything_and_loads_nothing():
    page = is_harmless(export(make_full_transcript(), "html").text)
    for said in (
        "A title",
        "/home/me/project",
        "Look:",
        "Hm.",
        "I look.",
        "Seen.",
        "-two",
        "+2",
        "the user",
        "No JSON.",
    ):
        assert said in page.text
    for said in (
        "model is now other",
        "Cut off: interrupted",
        "Tools: look",
        "System prompt",
        "0.7500 USD, 0.5000 EUR",
    ):
        assert said in page.text
    assert page.addresses.count(PIXEL) == 1


def test_sound_is_in_every_export():
    sound = {"type": "input_audio", "input_audio": {"data": BEEP, "format": "wav"}}
    transcript = make_transcript({"role": "user", "content": [{"type": "text", "text": "Listen:"}, sound]})
    page = is_harmless(export(transcript, "html").text)
    assert page.addresses.count(f"data:audio/wav;base64,{BEEP}") == 1
    assert "[audio: audio/wav, 44 bytes]" in export(transcript, "markdown").text
    assert BEEP in export(transcript.redact(), "jsonl").text
    trajectory = json.loads(export(transcript, "atif").text)
    assert trajectory["steps"][-1]["message"] == "Listen:\n\n[audio: audio/wav, 44 bytes]"


NAUGHTY = [
    "<script>alert(1)</script>",
    "</pre></details><img src=x onerror=alert(1)>",
    "'\"><svg/onload=alert(1)>",
    "javascript:alert(1)",
    "{{ 7*7 }}{% raw %}{# x #}",
    "```\n</code>\n~~~~\n# heading",
    "<!-- ",
    "]]>&lt;&amp;",
    "a\0b\x1b[31m\x07",
    "\u202eright to left\u2066",
    "half \ud800 a pair",
    "line\u2028line\x85line\r\nline",
    "data:text/html,<script>alert(1)</script>",
    "data:image/svg+xml;base64,PHN2ZyBvbmxvYWQ9YWxlcnQoMSk+",
    "data:image/png;base64,x",
    'data:image/png;base64,QQ==" onerror=alert(1)',
    "https://example.org/track.png",
    "",
]
texts = st.sampled_from(NAUGHTY) | st.text(max_size=30)


@st.composite
def logs(draw: st.DrawFn) -> list[Message]:
    """Draw any log; every text in it is a naughty one."""
    log: list[Any] = []
    for n in range(draw(st.integers(0, 5))):
        text, other = draw(texts), draw(texts)
        image = {"type": "image_url", "image_url": {"url": other}}
        sound = {"type": "input_audio", "input_audio": {"data": text, "format": other}}
        parts = [{"type": "text", "text": text}, image, sound]
        uses = [call(other, text, json.dumps({other: text})), call(f"{n}", other, other)]
        change = {"path": text, "old": draw(st.none() | texts), "new": draw(st.none() | texts)}
        log += draw(
            st.sampled_from(
                [
                    [{"role": "user", "content": text}],
                    [{"role": "user", "content": parts}],
                    [{"role": "assistant", "content": text, "reasoning_content": other, "crow": {"cut": text}}],
                    [
                        {"role": "assistant", "content": "", "tool_calls": uses},
                        {"role": "tool", "tool_call_id": f"{n}", "content": text, "crow": {"changes": [change]}},
                        {"crow": {"kind": "decision", "call": f"{n}", "is": text, "by": other}},
                        {"role": "tool", "tool_call_id": other, "content": parts, "crow": {"failed": True}},
                    ],
                    [{"crow": {"kind": "render", "purpose": text, "prompt": other, "text": text}}],
                    [{"crow": {"kind": "option", "option": text, "value": other}}, {"crow": {"kind": text}}],
                ]
            )
        )
    return log


@CALMLY
@given(logs(), texts, st.none() | texts, st.booleans())
def test_every_export_of_any_log_is_valid(log: list[Message], title: str, system: str | None, masks: bool):
    transcript = make_transcript(*log, title=title, system=system)
    transcript = transcript.redact() if masks else transcript
    exports = {format: export(transcript, format) for format in FORMATS}
    for one in exports.values():
        one.text.encode()
    is_harmless(exports["html"].text)
    is_trajectory(json.loads(exports["atif"].text), exports["atif"].files)
    lines = [json.loads(line) for line in exports["jsonl"].text.splitlines()]
    assert lines[1:] == transcript.record.log
    assert exports["markdown"].text.startswith("# ")


@pytest.mark.parametrize("format", FORMATS)
def test_exports_mask_secrets_unless_redaction_is_off(format: Format):
    secret = f"sk-ant-{KEY}"
    change = {"path": "/a", "old": f"KEY={secret}", "new": f"KEY = '{secret}'"}
    transcript = make_transcript(
        {"role": "user", "content": f"My key is {secret}."},
        {
            "role": "assistant",
            "reasoning_content": secret,
            "content": secret,
            "tool_calls": [call("a", "run", json.dumps({"token": KEY, "command": f"echo {secret}"}))],
        },
        {
            "role": "tool",
            "tool_call_id": "a",
            "content": [{"type": "text", "text": secret}],
            "crow": {"changes": [change]},
        },
        {"crow": {"kind": "render", "purpose": "x", "prompt": "p", "variables": {"password": KEY}, "text": secret}},
        title=secret,
        system=secret,
        calls=[asked("x", error=f"{secret} was refused")],
    )
    assert KEY in export(transcript, format).text
    assert KEY not in export(transcript.redact(), format).text


def test_tool_output_cannot_leave_its_fence():
    from markdown_it import MarkdownIt

    printed = "```\n````\n# not a heading\n<script>"
    transcript = make_transcript(
        {"role": "assistant", "content": "```python\nunclosed", "tool_calls": [call("a", "run", "{}")]},
        {"role": "tool", "tool_call_id": "a", "content": printed},
        {"role": "user", "content": "<!-- open"},
        {"role": "user", "content": "The end"},
    )
    tokens = MarkdownIt().parse(export(transcript, "markdown").text)
    assert [token.content for token in tokens if token.type == "fence"][-1].strip() == printed
    headings = [tokens[at + 1].content for at, token in enumerate(tokens) if token.type == "heading_open"]
    assert headings == ["A title", "Assistant", "run: `run()`", "User", "User"]
