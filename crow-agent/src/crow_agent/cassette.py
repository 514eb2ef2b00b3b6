"""Cassettes: the answers of a real endpoint, recorded once in a file and replayed to tests.

A file has JSON lines: the format, the models, then an exchange a line. It is played below the HTTP client, so that
requests and answers pass through all of crow. Placeholders stand for values that differ between runs: folders of the
test, temporary files of crow, session ids and secrets. In the first message they also stand for the date and the
platform.
"""

import asyncio
import json
import os
import platform
import re
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from datetime import date
from difflib import SequenceMatcher, unified_diff
from pathlib import Path
from typing import Any, cast

import crow_system as system
import httpx2
import msgspec
from crow_core.errors import ModelError
from crow_core.masking import MASK, find_secrets
from crow_core.models.chat_model import ChatModel
from crow_core.models.endpoint import create_http_client
from crow_core.models.model_call import Model, Prices
from crow_core.models.quirks import Quirks
from crow_system.shortening import shorten_line
from msgspec import structs

from crow_agent.errors import AgentError
from crow_agent.settings.config import load_config, load_environment
from crow_agent.settings.discovery import find_models
from crow_agent.settings.home import Home

FORMAT = 1
"""The version of the file's format."""
BODY_HEADERS = ("content-encoding", "content-length", "transfer-encoding")
"""Headers about the form of a body, which do not hold for the decoded one."""
LINE_LIMIT = 2_000
"""The most characters of a line in a diff."""


class CassetteError(AgentError):
    """A cassette cannot be used; the text names the file and says what to do."""


class FileHead(msgspec.Struct):
    """The first line of a cassette."""

    crow_cassette: int
    """The version of the format."""


class RecordedModel(msgspec.Struct, omit_defaults=True):
    """The settings of a model that was recorded, without its key and headers."""

    model: str
    """Its name at the endpoint."""
    wanted: str = ""
    """The name by which the agent asked for it."""
    base_url: str = ""
    parameters: dict[str, Any] = {}
    window: int | None = None
    prices: Prices | None = None
    quirks: Quirks = msgspec.field(default_factory=Quirks)


class Exchange(msgspec.Struct, omit_defaults=True):
    """A request for a completion, and its answer."""

    request: dict[str, Any]
    """The body, with placeholders for what differs from one run to the next."""
    answer: list[str | dict[str, Any]]
    """The lines of the answer; a dict stands for a line `data: {…}`."""
    status: int = 200
    end: str = ""
    """`broken` if the connection broke, `closed` if crow closed it before the answer had ended."""


class Cassette:
    """The exchanges of one test: those that are recorded, or those that are replayed, each once and in any order."""

    def __init__(
        self,
        path: Path,
        *,
        recording: bool,
        how: str = "pytest --crow-record",
        replacements: Mapping[str, str] = {},
        ignore: Sequence[str] = (),
    ) -> None:
        """Read the file, unless it is recorded. Raises CassetteError.

        `how` is the command that records it. `replacements` are texts with their placeholders. `ignore` are regular
        expressions: two requests are equal although texts differ in what these match.
        """
        self.path, self.recording, self.how = path, recording, how
        self.replacements = dict(replacements)
        self.models: list[RecordedModel] = []
        self.exchanges: list[Exchange] = []
        """The exchanges that were recorded."""
        self.waiting: list[Exchange] = []
        """Those among them that no request has asked for."""
        self.misses: list[str] = []
        """The texts about requests that were not recorded."""
        self._ignored = [re.compile(pattern) for pattern in ignore]
        self._live: dict[str, tuple[RecordedModel, ChatModel]] = {}
        """The models that are recorded, by the names they were asked for with."""
        self._temporary = re.compile(rf"{re.escape(tempfile.gettempdir())}/crow-[\w./-]*\w")
        """Matches crow's own temporary files: outputs that are too long for the model."""
        self._dates = {date.today().isoformat()}
        if not recording:
            self._load()

    def _load(self) -> None:
        try:
            lines = self.path.read_text("utf-8").rstrip("\n").split("\n")
        except FileNotFoundError:
            raise CassetteError(f"There is no cassette {self.path}. Record it: {self.how}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise CassetteError(f"{self.path} cannot be read: {error}.") from error
        for number, line in enumerate(lines, 1):
            try:
                value = json.loads(line)
                if number == 1 and msgspec.convert(value, FileHead).crow_cassette != FORMAT:
                    raise CassetteError(
                        f"{self.path} has the format {value['crow_cassette']} of another version of crow; this one "
                        f"reads {FORMAT}. Use that version, or record it anew: {self.how}"
                    )
                if number > 1 and isinstance(value, dict) and "model" in value:
                    self.models.append(msgspec.convert(value, RecordedModel))
                elif number > 1:
                    self.exchanges.append(msgspec.convert(value, Exchange))
            except (ValueError, RecursionError) as error:
                raise CassetteError(
                    f"{self.path}, line {number}, is no line of a cassette: {error}. Record it anew: {self.how}"
                ) from error
        self.waiting = [*self.exchanges]

    def save(self, *, replace: bool = True) -> None:
        """Write the file, in one step; without `replace`, only a new one with exchanges. Raises CassetteError."""
        if not replace and (self.path.exists() or not self.exchanges):
            return
        models = [structs.replace(recorded, window=model.window) for recorded, model in self._live.values()]
        values = [msgspec.to_builtins(each) for each in [FileHead(FORMAT), *models, *self.exchanges]]
        new = self.path.with_name(f"{self.path.name}.{os.getpid()}.new")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new.write_text("".join(f"{to_json(self.normalize(value))}\n" for value in values), "utf-8")
            system.replace_file(new, self.path)
        except OSError as error:
            raise CassetteError(f"{self.path} cannot be written: {error.strerror}.") from error

    def get_model(self, wanted: str | Model) -> ChatModel:
        """Return the model to use in place of the wanted one: the same, recorded, or one that replays.

        Raises CassetteError.
        """
        if not isinstance(wanted, str | ChatModel) or (isinstance(wanted, ChatModel) and wanted.client is not None):
            raise CassetteError(
                f"A cassette cannot record {wanted!r}: name a model of the configuration, or give a ChatModel "
                "without a client."
            )
        return self._get_recording_model(wanted) if self.recording else self._get_replaying_model(wanted)

    def _get_recording_model(self, wanted: str | ChatModel) -> ChatModel:
        model = find_model(wanted) if isinstance(wanted, str) else wanted
        self.replacements |= dict.fromkeys(model.secrets | find_secrets(dict(os.environ)), MASK)
        settings = {each.name: getattr(model, each.name) for each in fields(model) if each.name != "_pool"}
        settings |= {"transport": RecordingTransport(self, model), "refused_parameters": set[str]()}
        name, live = wanted if isinstance(wanted, str) else wanted.name, ChatModel(**settings)
        self._live[name] = to_recorded(name, model), live
        return live

    def _get_replaying_model(self, wanted: str | ChatModel) -> ChatModel:
        name = wanted if isinstance(wanted, str) else wanted.name
        known = next((each for each in self.models if each.wanted == name), None)
        if known is None:
            names = ", ".join(repr(each.wanted) for each in self.models) or "none"
            raise CassetteError(f"{self.path} has no model {name!r}; it has {names}. Record it anew: {self.how}")
        return ChatModel(
            name=known.model,
            base_url=known.base_url,
            parameters=known.parameters,
            window=known.window,
            prices=known.prices,
            quirks=known.quirks,
            transport=ReplayingTransport(self),
        )

    def list_replacements(self) -> list[tuple[str, str]]:
        """List the texts to replace, the longest first, also as they are written inside of JSON."""
        pairs = {text: placeholder for text, placeholder in self.replacements.items() if text}
        pairs |= {json.dumps(text)[1:-1]: placeholder for text, placeholder in pairs.items()}
        return sorted(pairs.items(), key=lambda pair: -len(pair[0]))

    def normalize(self, value: Any) -> Any:
        """Return a JSON value with the placeholders in its texts."""
        pairs = self.list_replacements()

        def replace_all(text: str) -> str:
            for old, new in pairs:
                text = text.replace(old, new)
            return text

        return map_texts(value, replace_all)

    def normalize_request(self, raw: bytes) -> tuple[dict[str, Any], dict[str, str]]:
        """Return a request as it is stored and compared, and its temporary files with their placeholders.

        Their names are random: a placeholder has the number under which the request names the file first.
        """
        self._dates.add(date.today().isoformat())
        text = to_json(self.normalize(json.loads(raw)))
        found = dict.fromkeys(self._temporary.findall(text))
        temporary = {path: f"<temporary-{number}>" for number, path in enumerate(found, 1)}
        body: dict[str, Any] = json.loads(self._temporary.sub(lambda match: temporary[match[0]], text))
        machine = f"{platform.system()} {platform.machine()}"

        def replace_in_prompt(text: str) -> str:
            for day in self._dates:
                text = text.replace(day, "<date>")
            return text.replace(machine, "<platform>")

        match body:
            case {"messages": [first, *others]}:
                return {**body, "messages": [map_texts(first, replace_in_prompt), *others]}, temporary
            case _:
                return body, temporary

    def to_comparable(self, request: dict[str, Any]) -> Any:
        """Return a stored request without its ignored parts."""

        def drop(text: str) -> str:
            for pattern in self._ignored:
                text = pattern.sub("<ignored>", text)
            return text

        return map_texts(request, drop) if self._ignored else request

    def add(self, body: bytes, status: int, answer: bytes, end: str) -> None:
        """Record an exchange."""
        request, temporary = self.normalize_request(body)
        lines = parse_lines(answer)
        for old, new in [*self.list_replacements(), *temporary.items()]:
            lines = replace_in_lines(lines, old, new)
        end = "" if "data: [DONE]" in lines else end
        self.exchanges.append(Exchange(request, lines, status, end))

    def answer(self, body: bytes) -> tuple[Exchange, bytes]:
        """Take the exchange that was recorded for a request, and the body of its answer. Raises ModelError."""
        request, temporary = self.normalize_request(body)
        wanted = self.to_comparable(request)
        for exchange in self.waiting:
            if self.to_comparable(exchange.request) == wanted:
                self.waiting.remove(exchange)
                return exchange, self._restore(exchange, temporary)
        self.misses.append(self._describe_miss(wanted))
        raise ModelError(self.misses[-1].partition("\n")[0])

    def _describe_miss(self, wanted: Any) -> str:
        again = f"If that is right, record it anew: {self.how}"
        known = [to_text_lines(self.to_comparable(exchange.request)) for exchange in self.exchanges]
        lines = to_text_lines(wanted)
        if lines in known:
            return f"{self.path.name} has no answer left for a request that is sent more often than before. {again}"
        if not known:
            return f"{self.path.name} has no requests, and one was sent. {again}"
        unused = [to_text_lines(self.to_comparable(exchange.request)) for exchange in self.waiting]
        nearest = max(unused or known, key=lambda each: SequenceMatcher(None, each, lines, autojunk=False).ratio())
        diff = [line[:LINE_LIMIT] for line in unified_diff(nearest, lines, "recorded", "sent", n=2, lineterm="")]
        return "\n".join([f"{self.path.name} has no such request; the nearest one differs. {again}", "", *diff])

    def _restore(self, exchange: Exchange, temporary: Mapping[str, str]) -> bytes:
        """Return the body of a recorded answer, with the folders and files of this test."""
        body = "\n".join(line if isinstance(line, str) else f"data: {json.dumps(line)}" for line in exchange.answer)
        for text, placeholder in [*self.replacements.items(), *temporary.items()]:
            if placeholder not in ("<session>", MASK):
                body = body.replace(placeholder, json.dumps(text)[1:-1])
        return body.encode("utf-8", "surrogateescape")

    def describe_waiting(self) -> str:
        """List the recorded requests that were never sent; empty if there are none."""
        if not self.waiting:
            return ""
        lines = [f"  {describe_last_message(exchange.request)}" for exchange in self.waiting]
        count = f"{len(self.waiting)} of the {len(self.exchanges)} requests in {self.path.name}"
        return "\n".join([f"{count} were never sent. If that is right, record it anew: {self.how}", *lines])


class RecordingTransport(httpx2.AsyncBaseTransport):
    """Sends requests to an endpoint, and records those for completions with their answers."""

    def __init__(self, cassette: Cassette, model: ChatModel) -> None:
        self._cassette, self._model = cassette, model
        self._http: httpx2.AsyncClient | None = None

    async def __aexit__(self, *_: object) -> None:
        """Keep the connections, although a client that was made for one request ends: others use them."""

    async def aclose(self) -> None:
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self._http = self._http or create_http_client(self._model.base_url, "", self._model.read_timeout, {})
        response = await self._http.send(request, stream=True)
        headers = [(name, value) for name, value in response.headers.multi_items() if name not in BODY_HEADERS]
        stream = RecordedStream(self._cassette, request, response)
        return httpx2.Response(response.status_code, headers=headers, stream=stream)


class RecordedStream(httpx2.AsyncByteStream):
    """The body of an answer, which is recorded when it ends."""

    def __init__(self, cassette: Cassette, request: httpx2.Request, response: httpx2.Response) -> None:
        self._cassette, self._request, self._response = cassette, request, response
        self._received = bytearray()
        self._end = "closed"
        self._open = True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for data in self._response.aiter_bytes():
                self._received += data
                yield data
            self._end = ""
        except httpx2.HTTPError:
            self._end = "broken"
            raise

    async def aclose(self) -> None:
        if self._open and is_for_completion(self._request):
            body, status = self._request.content, self._response.status_code
            self._cassette.add(body, status, bytes(self._received), self._end)
        self._open = False
        await self._response.aclose()


class ReplayingTransport(httpx2.AsyncBaseTransport):
    """Answers requests for completions from a cassette, and any other with HTTP 404."""

    def __init__(self, cassette: Cassette) -> None:
        self._cassette = cassette

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if not is_for_completion(request):
            return httpx2.Response(404)
        exchange, body = self._cassette.answer(request.content)
        # The headers of answers are not recorded; a limit of requests is not waited for.
        headers = {} if exchange.status == 200 else {"retry-after": "0"}
        return httpx2.Response(exchange.status, headers=headers, stream=ReplayedStream(body, exchange.end))


class ReplayedStream(httpx2.AsyncByteStream):
    """The body of a recorded answer."""

    def __init__(self, body: bytes, end: str) -> None:
        self._body, self._end = body, end

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._body
        if self._end == "broken":
            raise httpx2.ReadError("the connection broke here when this was recorded")
        if self._end == "closed":
            await asyncio.Event().wait()


def is_for_completion(request: httpx2.Request) -> bool:
    """Return whether a request asks for a completion."""
    return request.method == "POST" and request.url.path.endswith("/chat/completions")


def find_model(wanted: str) -> ChatModel:
    """Find the model to record in the user's configuration and environment. Raises CassetteError."""

    async def find() -> Mapping[str, Model]:
        home = Home.find(os.environ)
        config, env = load_config(home, os.environ), load_environment(home, os.environ)
        return await find_models(config, env, wanted)

    try:
        with ThreadPoolExecutor(1) as executor:  # an event loop may run in this thread
            model = next(iter(executor.submit(lambda: asyncio.run(find())).result().values()))
    except Exception as error:  # of the configuration, a file or the network: each has its sentence
        raise CassetteError(f"There is no model to record: {error}") from error
    assert isinstance(model, ChatModel)
    return model


def to_recorded(wanted: str, model: ChatModel) -> RecordedModel:
    """Convert a model to its stored form."""
    return RecordedModel(
        model.name, wanted, model.display_url, dict(model.parameters), model.window, model.prices, model.quirks
    )


def to_json(value: Any) -> str:
    """Encode a JSON value in one line, readable where it is valid Unicode."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return json.dumps(value)


def map_texts(value: Any, convert: Any) -> Any:
    """Return a JSON value with each of its texts converted."""
    match value:
        case str():
            return convert(value)
        case dict():
            return {key: map_texts(inner, convert) for key, inner in cast("dict[str, Any]", value).items()}
        case list():
            return [map_texts(inner, convert) for inner in cast("list[Any]", value)]
        case _:
            return value


def parse_lines(body: bytes) -> list[Any]:
    """Split the body of an answer into lines; those that are `data: {…}` become dicts."""
    lines: list[Any] = []
    for line in re.split("\r?\n", body.decode("utf-8", "surrogateescape")):
        try:
            value = json.loads(line[5:]) if line.startswith("data:") else None
        except (ValueError, RecursionError):
            value = None
        lines.append(value if isinstance(value, dict) else line)
    return lines


def replace_in_lines(lines: list[Any], old: str, new: str) -> list[Any]:
    """Replace a text in the lines of a stream, also where it is spread over the pieces of several lines."""
    places: dict[tuple[Any, ...], list[tuple[Any, Any]]] = {}

    def collect(container: Any, path: tuple[Any, ...]) -> None:
        items: list[tuple[Any, Any]] = [*(container.items() if hasattr(container, "items") else enumerate(container))]
        for key, value in items:
            step = cast("dict[str, Any]", value).get("index", key) if isinstance(value, dict) else key
            if isinstance(value, str):
                places.setdefault((*path, step), []).append((container, key))
            elif isinstance(value, dict | list):
                collect(value, (*path, step))

    for line in lines:
        if isinstance(line, dict):
            collect(line, ())
    for found in places.values():
        pieces = replace_in_pieces([container[key] for container, key in found], old, new)
        for (container, key), piece in zip(found, pieces, strict=True):
            container[key] = piece
    return [line.replace(old, new) if isinstance(line, str) else line for line in lines]


def replace_in_pieces(pieces: list[str], old: str, new: str) -> list[str]:
    """Replace a text in the pieces of a longer one; the replacement stands in the piece where the text began."""
    text = "".join(pieces)
    starts = [match.start() for match in re.finditer(re.escape(old), text)]
    if not starts:
        return pieces
    changed: list[str] = []
    begin = 0
    for piece in pieces:
        at, end, kept = begin, begin + len(piece), ""
        for start in starts:
            if start < end and start + len(old) > begin:
                kept += text[at : max(start, at)] + (new if start >= begin else "")
                at = min(start + len(old), end)
        changed.append(kept + text[at:end])
        begin = end
    return changed


def to_text_lines(request: Any) -> list[str]:
    """Convert a request to lines for a diff; line breaks in its texts are line breaks."""
    text = json.dumps(request, indent=1, ensure_ascii=False, sort_keys=True)
    return text.replace("\\n", "\n    ").split("\n")


def describe_last_message(request: Mapping[str, Any]) -> str:
    """Make one line of the message that a request ends with."""
    messages: list[dict[str, Any]] = request.get("messages") or [{}]
    last = messages[-1]
    text = str(last.get("content")).replace("\n", " ")
    return f"{last.get('role', 'message')}: {shorten_line(text, 100)}"
