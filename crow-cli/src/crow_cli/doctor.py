"""`crow doctor`: what an endpoint can do, tried out; each probe is one question to it."""

import json
import logging
import os
import re
import shutil
import tomllib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any, Literal

import click
import msgspec
from crow_core.errors import ConfigError, ModelError
from crow_core.extensions.printed_calls import is_printed_call
from crow_core.messages import Delta, Message, answer_tool_call, parse_arguments, settle, view
from crow_core.models.chat import TOOL_ADVICE, ChatModel, ModelCall, ModelRequest
from crow_core.models.endpoint import CONNECT_TIMEOUT, create_http_client, join_url
from crow_core.models.estimate import count_min_tokens
from crow_core.models.quirks import Quirks
from crow_core.models.stream import parse_object, shorten_text
from crow_core.models.usage import count_cached_tokens, to_count
from crow_core.models.window import filter_objects, find_window
from crow_core.settings.config import Config, Home, load_config, load_environment
from crow_core.settings.discovery import find_models
from msgspec import structs

from crow_cli.screen import spelled_out

Verdict = Literal["ok", "partly", "no"]

LIMIT = 1500
"""Tokens a reply may take: enough to think first."""

COLOURS: dict[Verdict, str] = {"ok": "green", "partly": "yellow", "no": "red"}


@dataclass(frozen=True)
class Finding:
    """What one probe found."""

    verdict: Verdict
    """`ok`: as everyone does it; `partly`: in a way that crow copes with; `no`: crow cannot work with this."""
    sentence: str
    quirks: dict[str, Any] = field(default_factory=dict[str, Any])
    """What the model's settings should say of it."""


@dataclass(kw_only=True)
class Patient(ChatModel):
    """An endpoint under examination: a model whose every byte is kept until the next question."""

    tape: bytearray = field(default_factory=bytearray)
    """What came over the wire in answer to the last question."""
    notices: list[str] = field(default_factory=list[str])
    """What a person would have been told meanwhile."""
    long: ModelCall | None = None
    """The answer to a long prompt, to be asked once more."""

    @asynccontextmanager
    async def post(self, body: ModelRequest) -> AsyncGenerator[AsyncIterator[bytes]]:
        self.tape.clear()
        async with super().post(body) as chunks:
            yield self.taped(chunks)

    async def taped(self, chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
        async for chunk in chunks:
            self.tape += chunk
            yield chunk

    async def say(self, prompt: "str | list[Message]", **more: Any) -> ModelCall:
        """The whole answer to a question. Raises ModelError."""
        messages = [Message(role="user", content=prompt)] if isinstance(prompt, str) else prompt
        call = ModelCall(self, {"temperature": 0, "max_tokens": LIMIT, **more, "messages": messages}, "doctor")

        async def tell(delta: Delta) -> None:
            if "notice" in delta:
                self.notices.append(delta["notice"].replace(" Asking again now.", ""))

        await call.run(tell)
        call.reply = settle(call.reply, used=set())
        return call

    def events(self) -> list[dict[str, Any]]:
        """The events on the tape."""
        lines = (line[5:].strip() for line in bytes(self.tape).splitlines() if line.startswith(b"data:"))
        return [chunk for line in lines if (chunk := parse_object(line))]


def said(model_call: ModelCall) -> str:
    """A reply's text."""
    return str(model_call.reply.get("content") or "")


def arguments(model_call: ModelCall) -> list[dict[str, Any] | None]:
    """What each call was made with; None for what is no JSON object."""
    return [parse_arguments(use) for use in model_call.reply.get("tool_calls", [])]


def tool(name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


WEATHER = tool(
    "weather",
    "The weather in a city, now.",
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)

FORECAST = tool(
    "forecast",
    "The weather of the coming days.",
    {
        "type": "object",
        "properties": {
            "place": {"$ref": "#/$defs/Place"},
            "days": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
        },
        "required": ["place"],
        "$defs": {
            "Place": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "country": {"type": "string"}},
                "required": ["city", "country"],
            }
        },
    },
)

RED = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAIAAAAlC+aJAAAAS0lEQVR42u3PQQkAAAgAsetfWiP4FgYrsKZeS0BA"
    "QEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEDgsqnc8OJg6Ln3AAAAAElFTkSuQmCC"
)
"""64 by 64 pixels, all red."""

TALE = "A crow sat on a wire above the old harbour and watched the boats come home before the rain. "


# The probes, in the order in which they are made.


async def address(patient: Patient) -> Finding:
    """Whether anything answers there."""
    import httpx2  # as in model.py

    try:
        async with create_http_client(patient.base_url, patient.api_key, CONNECT_TIMEOUT, patient.headers) as http:
            response = await http.get(join_url(patient.base_url, "models"))
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        return Finding("no", str(patient.to_model_error(error)))
    except UnicodeEncodeError:
        return Finding("no", "The api_key or a header holds characters that no header can hold.")
    names = listed(response.content)
    if not names:
        return Finding("partly", f"It answers, and does not list its models ({response.status_code}).")
    if patient.name in names or f"{patient.name}:latest" in names:
        return Finding("ok", f"It answers, and lists {len(names)} models, this one among them.")
    return Finding("partly", f"It answers, and lists other models than this one: {', '.join(names[:5])}.")


def listed(listing: bytes) -> list[str]:
    """The names in a list of models."""
    entries = filter_objects((parse_object(listing) or {}).get("data"))
    return [entry["id"] for entry in entries if isinstance(entry.get("id"), str)]


async def answers(patient: Patient) -> Finding:
    """Whether the key and the model's name are good."""
    call = await patient.say("Say hello, in one word.")
    if not said(call):
        return Finding("no", f"It takes the request and says nothing (finish_reason {call.finish_reason!r}).")
    with_key = "takes the key" if patient.api_key else "asks for no key"
    return Finding("ok", f"It {with_key}, knows the model, and says {shorten_text(said(call))[:40]!r}.")


async def streaming(patient: Patient) -> Finding:
    """Whether an answer comes in pieces, and ends as it should."""
    call = await patient.say("Count from one to ten, in words.")
    events = len(patient.events())
    if events < 3:
        return Finding("partly", "Answers come in one piece; you see nothing until they are complete.")
    if b"[DONE]" not in patient.tape:
        return Finding("partly", "Answers come in pieces, without [DONE] at their end; a cut may go unnoticed.")
    return Finding("ok", f"Answers come in pieces ({events} events).") if said(call) else silent(call)


def silent(model_call: ModelCall) -> Finding:
    return Finding("no", f"It said nothing (finish_reason {model_call.finish_reason!r}).")


async def usage(patient: Patient) -> Finding:
    """Whether tokens are counted in a stream."""
    call = await patient.say("Say hello, in one word.")
    if tokens := to_count(call.usage.get("prompt_tokens")):
        return Finding("ok", f"Tokens are counted ({tokens} for a short prompt).")
    return Finding("partly", "Tokens are not counted in streams: crow estimates, and cannot see a prompt being cut.")


async def instructions(patient: Patient) -> Finding:
    """Whether a system prompt is obeyed."""
    system = Message(role="system", content="Whatever the user says, answer with the one word PELICAN.")
    call = await patient.say([system, Message(role="user", content="How are you?")])
    if "PELICAN" in said(call).upper():
        return Finding("ok", f"Instructions are followed, as the role {patient.quirks.system_role!r}.")
    return Finding("partly", f"Instructions were not followed: it said {shorten_text(said(call))[:40]!r}.")


async def length(patient: Patient) -> Finding:
    """Whether a reply stops at its limit, and says that it did."""
    call = await patient.say("Count from 1 to 300, separated by commas.", max_tokens=32)
    if call.finish_reason == "length":
        return Finding("ok", "A reply that reaches its limit says so.")
    if "300" in said(call):
        return Finding("partly", "The limit of a reply is ignored.")
    return Finding("partly", f"A reply cut at its limit says {call.finish_reason!r}: it looks complete.")


async def tools(patient: Patient) -> Finding:
    """Whether a tool is called."""
    call = await patient.say("What is the weather in Paris? Call the tool.", tools=[WEATHER])
    if not (made := arguments(call)):
        return uncalled(call)
    if made[0] is None or not isinstance(made[0].get("city"), str):
        return Finding(
            "partly", f"Tools are called, with arguments that do not fit: {shorten_text(str(made[0]))[:60]}."
        )
    return Finding("ok", "Tools are called.")


def uncalled(model_call: ModelCall) -> Finding:
    if is_printed_call(model_call):
        return Finding("no", f"Calls are printed as text. {TOOL_ADVICE}")
    return Finding("no", f"The tool was not called; it said {shorten_text(said(model_call))[:60]!r}. {TOOL_ADVICE}")


async def parallel(patient: Patient) -> Finding:
    """Whether several tools are called at once."""
    question = "What is the weather in Paris and in Oslo? Call the tool for both at once."
    call = await patient.say(question, tools=[WEATHER])
    cities = {str(made["city"]) for made in arguments(call) if made and "city" in made}
    if len(cities) > 1:
        return Finding("ok", "Several calls come in one reply.")
    return Finding("partly", "One call comes at a time.") if cities else uncalled(call)


async def ids(patient: Patient) -> Finding:
    """Whether the calls of the last reply can be told apart."""
    begun = [
        part
        for part in fragments(patient.events())
        if any(f.get("name") for f in filter_objects([part.get("function")]))
    ]
    if not begun:
        return Finding("partly", "There was no streamed call to look at.")
    lacks = [key for key in ("id", "index") if any(part.get(key) in (None, "") for part in begun)]
    same = [key for key in ("id", "index") if key not in lacks and len({part[key] for part in begun}) < len(begun)]
    if not lacks and not same:
        return Finding("ok", "Each call has an id and an index of its own.")
    faults = [*(f"no {key}" for key in lacks), *(f"the same {key}" for key in same)]
    return Finding("partly", f"Calls have {' and '.join(faults)}; crow tells them apart all the same.")


def fragments(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fragments of tool calls inside events."""
    return [part for delta in deltas(events) for part in filter_objects(delta.get("tool_calls"))]


def deltas(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    choices = [choice for event in events for choice in filter_objects(event.get("choices"))]
    return filter_objects([choice.get("delta") or choice.get("message") for choice in choices])


async def reasoning(patient: Patient) -> Finding:
    """Where reasoning comes, and whether it is wanted back together with a tool's result."""
    question: Message = {"role": "user", "content": "What is the weather in Paris? Call the tool, then tell me."}
    call = await patient.say([question], tools=[WEATHER])
    keys = [key for key in ("reasoning_content", "reasoning") if any(d.get(key) for d in deltas(patient.events()))]
    where = f"comes as {keys[0]}" if keys else "comes inside <think>" if call.reply.get("reasoning_content") else ""
    results = [answer_tool_call(use, "Sunny, 21 °C.") for use in call.reply.get("tool_calls", [])]
    after = await patient.say(list(view([question, call.reply, *results])), tools=[WEATHER])
    if not said(after) and not after.reply.get("tool_calls"):
        return Finding("no", "After a tool's result it says nothing.")
    changes = {"reasoning": keys[0]} if keys and patient.quirks.echo != "never" else {}
    back = "is not needed back" if patient.quirks.echo == "never" else f"goes back ({patient.quirks.echo})"
    return Finding("ok", f"Reasoning {where}, and {back}." if where else f"No reasoning is shown; it {back}.", changes)


async def schemas(patient: Patient) -> Finding:
    """Whether a schema with references, choices and objects inside objects is understood."""
    if await fits(patient):
        return Finding("ok", "Schemas with $defs and nested objects are understood.")
    if patient.quirks.schemas == "full":
        patient.quirks = structs.replace(patient.quirks, schemas="plain")
        if await fits(patient):
            return Finding("partly", "Schemas with $defs are misunderstood; spelled out plainly, they are not.")
        patient.quirks = structs.replace(patient.quirks, schemas="full")
    return Finding(
        "partly", "Arguments of nested objects do not fit their schema; the model will be told, and try again."
    )


async def fits(patient: Patient) -> bool:
    question = "Call the tool for the city of Oslo in Norway, for 3 days."
    made = arguments(await patient.say(question, tools=[FORECAST]))
    place: Any = made[0].get("place") if made and made[0] else None
    return isinstance(place, dict) and {"city", "country"} <= place.keys()  # pyright: ignore[reportUnknownMemberType]


async def images(patient: Patient) -> Finding:
    """Whether the model sees."""
    parts = [
        {"type": "text", "text": "Which colour is this picture? Answer in one word."},
        {"type": "image_url", "image_url": {"url": RED}},
    ]
    if not patient.quirks.images:
        return Finding("ok", "The model is known not to see; notes stand in the place of images.")
    call = await patient.say([Message(role="user", content=parts)])
    if not patient.quirks.images:
        return Finding("partly", "Images are refused.")
    if "red" in said(call).lower():
        return Finding("ok", "The model sees.")
    told = shorten_text(said(call))[:40]
    return Finding("partly", f"Images are taken but not seen: of a red one it said {told!r}.", {"images": False})


async def window(patient: Patient) -> Finding:
    """How much fits, as the server tells it."""
    told, configured = await find_window(patient), patient.window
    if told and configured and told < configured:
        patient.window = told
        return Finding("partly", f"{told:,} tokens fit, and not {configured:,} as the settings say.")
    if told:
        patient.window = min(told, configured or told)
        return Finding("ok", f"{told:,} tokens fit, the server says.")
    if configured:
        return Finding("ok", f"The server does not tell how much fits; {configured:,} tokens are configured.")
    return Finding("partly", "The server does not tell how much fits. Set window in the model's settings.")


async def reading(patient: Patient) -> Finding:
    """Whether the beginning of a long prompt is read."""
    times = min(6000, (patient.window or 9000) // 3) // len(TALE.split())
    prompt = f"The password is HERON.\n\n{TALE * times}\n\nWhat is the password? Answer in one word."
    call = patient.long = await patient.say(prompt)
    must, counted = count_min_tokens(call.request["messages"]), to_count(call.usage.get("prompt_tokens"))
    counted += cached if (cached := count_cached_tokens(call.usage)) > counted else 0
    if counted and counted < 0.8 * must:
        advice = "Give it a larger context (Ollama: num_ctx, llama.cpp: -c)."
        return Finding(
            "no", f"Of at least {must:,} tokens it read {counted:,}: it cuts the beginning silently. {advice}"
        )
    if "HERON" in said(call).upper():
        return Finding("ok", f"A prompt of about {counted or must:,} tokens is read from its beginning.")
    return Finding("partly", f"Of a prompt of about {counted or must:,} tokens it did not find the beginning.")


async def cache(patient: Patient) -> Finding:
    """Whether a prompt that begins like the one before is read faster."""
    before = patient.long
    if before is None:
        return Finding("partly", "There was no long prompt to ask again.")
    call = await patient.say(before.request["messages"])
    if cached := count_cached_tokens(call.usage):
        return Finding("ok", f"{cached:,} of {to_count(call.usage.get('prompt_tokens')):,} tokens came from the cache.")
    first, second = before.first_delta - before.started, call.first_delta - call.started
    if first > 1 and second < first / 3:
        return Finding("ok", f"The same prompt was answered after {second:.1f} s in place of {first:.1f} s.")
    return Finding("partly", "The server does not tell of a cache: long sessions may be slow.")


Probe = Callable[[Patient], Awaitable[Finding]]

PROBES: dict[str, Probe] = {
    "address": address,
    "key and model": answers,
    "streaming": streaming,
    "usage": usage,
    "instructions": instructions,
    "stop at length": length,
    "tool calls": tools,
    "parallel calls": parallel,
    "ids and index": ids,
    "nested schemas": schemas,
    "reasoning": reasoning,
    "images": images,
    "window": window,
    "long prompts": reading,
    "cache": cache,
}

VITAL = frozenset({"address", "key and model"})
"""Without these, nothing else can be asked."""


@dataclass
class Report:
    """All that was found."""

    findings: dict[str, Finding] = field(default_factory=dict[str, Finding])
    quirks: dict[str, Any] = field(default_factory=dict[str, Any])
    """Where the endpoint differs from what was known of it."""

    @property
    def code(self) -> int:
        """The exit code: 0 when crow can work with all of it, 1 when not, 2 when nothing could be asked."""
        bad = {name for name, finding in self.findings.items() if finding.verdict == "no"}
        return 2 if bad & VITAL else 1 if bad else 0


async def examine(patient: Patient, tell: Callable[[str, Finding], None] = lambda name, finding: None) -> Report:
    """Make every probe; `tell` hears each finding as it comes."""
    report, before = Report(), patient.quirks
    try:
        for name, probe in PROBES.items():
            report.findings[name] = finding = await find(patient, probe)
            tell(name, finding)
            if name in VITAL and finding.verdict == "no":
                break
    finally:
        await patient.close()
    report.quirks = changes(before, patient.quirks)
    return report


async def find(patient: Patient, probe: Probe) -> Finding:
    """One probe, with what was learned on its way."""
    before = patient.quirks
    patient.notices.clear()
    try:
        finding = await probe(patient)
    except ModelError as error:
        finding = Finding("no", str(error))
    patient.quirks = structs.replace(patient.quirks, **finding.quirks)
    heard = " ".join(dict.fromkeys(patient.notices))
    if heard:
        verdict: Verdict = "partly" if finding.verdict == "ok" else finding.verdict
        finding = replace(finding, verdict=verdict, sentence=f"{finding.sentence} On the way: {heard}")
    return replace(finding, quirks=changes(before, patient.quirks))


def changes(before: Quirks, after: Quirks) -> dict[str, Any]:
    """Where quirks differ."""
    old, new = structs.asdict(before), structs.asdict(after)
    return {name: value for name, value in new.items() if value != old[name]}


# The command.


async def doctor(env: Mapping[str, str], wanted: str, *, as_json: bool, save: bool) -> int:
    """Examine a model, print what was found, and save its quirks if wanted; gives the exit code.

    Raises ConfigError and ModelError.
    """
    logging.getLogger("stamina").setLevel(logging.ERROR)  # what was asked again is part of the finding
    home = Home.find(env)
    config, env = load_config(home, env), load_environment(home, env)
    name, patient = await choose(config, env, wanted)
    path = home.config / "config.toml"
    if save:
        check_unsaved(path, config, name)
    report = await examine(patient, (lambda name, finding: None) if as_json else row)
    if as_json:
        click.echo(spelled_out(as_text(name, patient, report)))
    if save and report.quirks:
        append_table(path, table(name, report.quirks))
    if not as_json:
        click.echo(spelled_out(ending(name, report, path if save else None)))
    return report.code


async def choose(config: Config, env: Mapping[str, str], wanted: str) -> tuple[str, Patient]:
    """The model to examine. Raises ModelError."""
    name, model = next(iter((await find_models(config, env, wanted)).items()))
    if not isinstance(model, ChatModel):
        raise ModelError(f"The model {name!r} is behind no endpoint that could be examined.")
    patient = Patient(
        name=model.name,
        base_url=model.base_url,
        api_key=model.api_key,
        headers=model.headers,
        parameters=model.parameters,
        window=model.window,
        idle_timeout=model.idle_timeout,
        quirks=model.quirks,
        attempts=3,
    )
    return name, patient


def row(name: str, finding: Finding) -> None:
    """Print a finding as a line of the table."""
    verdict = click.style(f"{finding.verdict:<8}", fg=COLOURS[finding.verdict])
    click.echo(f"{verdict}{name:<16}{spelled_out(finding.sentence)}")


def as_text(name: str, patient: Patient, report: Report) -> str:
    """A report as JSON."""
    found = [{"probe": probe, **msgspec.to_builtins(finding)} for probe, finding in report.findings.items()]
    whole = {
        "model": name,
        "endpoint": patient.display_url,
        "date": today(),
        "findings": found,
        "quirks": report.quirks,
    }
    return json.dumps(whole, ensure_ascii=False)


def ending(name: str, report: Report, saved: Path | None) -> str:
    """What to do with it."""
    if not report.quirks:
        return "\nThere is nothing to set." if report.code < 2 else ""
    if saved:
        return f"\nSaved to {saved}:\n\n{table(name, report.quirks)}"
    return f"\nFor your config.toml (--save writes it there):\n\n{table(name, report.quirks)}"


def today() -> str:
    return date.today().isoformat()


def table(name: str, quirks: Mapping[str, Any]) -> str:
    """Quirks as a table of the configuration, with the date."""
    key = name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)
    lines = [f"{quirk} = {json.dumps(value, ensure_ascii=False)}" for quirk, value in quirks.items()]
    return "\n".join([f"[models.{key}.quirks]  # found by crow doctor on {today()}", *lines, ""])


def check_unsaved(path: Path, config: Config, name: str) -> None:
    """Raises ConfigError where there is no place to save to."""
    if name not in config.models:
        raise ConfigError(f"--save: {path} has no [models.{name}]. Write its base_url and model there first.")
    if config.models[name].quirks:
        raise ConfigError(f"--save: {path} has quirks for {name!r} already. Remove them, or edit them by hand.")


def append_table(path: Path, text: str) -> None:
    """Append a table to a file and leave every other byte as it is. Raises ConfigError where that cannot be."""
    path = path.resolve()
    try:
        before = path.read_bytes()
        newline = "\r\n" if b"\r\n" in before else "\n"
        gap = newline if before.endswith(b"\n") or not before else newline * 2
        after = before + (gap + text.replace("\n", newline)).encode()
        tomllib.loads(after.decode().replace("\r\n", "\n"))
        draft = path.with_name(path.name + ".crow")
        draft.write_bytes(after)
        shutil.copymode(path, draft)
        os.replace(draft, path)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{path} cannot take another table at its end ({error}). Add this by hand:\n{text}"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}. Add this by hand:\n{text}") from error
