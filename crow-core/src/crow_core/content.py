"""Convert between the two protocols and the log.

- ACP content blocks to a user message: to_user_message, and back: to_blocks
- a tool call to ACP updates: to_announcement, to_update
- a tool result of MCP to a tool message: to_tool_message, and back: to_result
- the log to ACP updates: replay
"""

import re
from base64 import b64decode
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from crow_system.shortening import shorten_line, shorten_middle
from msgspec import UNSET, UnsetType, ValidationError, to_builtins

from crow_core.acp import schema
from crow_core.acp.decoding import convert_leniently, to_raw
from crow_core.acp.schema import (
    AgentMessageChunk,
    AgentThoughtChunk,
    AudioBlock,
    BlockContent,
    CompactionUpdate,
    ContentBlock,
    DiffContent,
    ImageBlock,
    PlanEntry,
    PlanUpdate,
    ResourceBlock,
    ResourceLinkBlock,
    SessionUpdate,
    TerminalContent,
    TextBlock,
    ToolCallContent,
    ToolCallLocation,
    ToolCallUpdate,
    ToolKind,
    UserMessageChunk,
)
from crow_core.mcp.result import LEFT_TO_SERVER, ToolResult
from crow_core.mcp.tool import ToolCall, unwrap_proxy_call
from crow_core.messages.message import (
    INTERRUPTED,
    NOT_RUN,
    Message,
    RawToolCall,
    answer_tool_call,
    join_content,
    marker_kind,
    parse_arguments,
    to_parts,
)
from crow_core.messages.notes import Notes, ShownCall
from crow_core.messages.passes import drop_rewound
from crow_core.messages.tool_metadata import ResultMeta
from crow_core.messages.tool_names import name_raw_calls
from crow_core.paths import from_uri
from crow_core.text import clean_lines, fence, to_line

TITLE_LIMIT = 60
"""Characters of the title that a session gets from its first prompt."""
RAW_OUTPUT_LIMIT = 10_000
"""Characters of a result that `rawOutput` has at most."""

IMAGE_LIMIT = 20_000_000
"""Bytes of an image that a model is sent; some endpoints take fewer."""
IMAGE_SIGNATURES = (
    ("image/png", re.compile(rb"\x89PNG\r\n\x1a\n")),
    ("image/jpeg", re.compile(rb"\xff\xd8\xff")),
    ("image/gif", re.compile(rb"GIF8[79]a")),
    ("image/webp", re.compile(rb"RIFF.{4}WEBP", re.S)),
    ("image/bmp", re.compile(rb"BM.{4}\0\0\0\0", re.S)),
    ("image/tiff", re.compile(rb"II\*\0|MM\0\*")),
    ("image/heic", re.compile(rb".{4}ftyp(hei[cxms]|hev[cx]|mif1|msf1)", re.S)),
    ("image/avif", re.compile(rb".{4}ftypavi[fs]", re.S)),
)
"""The kinds of images that models may take, and how the bytes of each begin."""


def to_user_message(blocks: Sequence[ContentBlock]) -> Message:
    """Convert the blocks of a prompt to one user message.

    The content is a string unless there are images or sounds. If there is more than text, the notes keep the blocks.
    """
    message = to_plain_message(blocks)
    if not all(isinstance(block, TextBlock) for block in blocks):
        message["crow"] = {"blocks": [to_note(block) for block in blocks]}
    return message


def attach_blocks(message: Message, blocks: Sequence[ContentBlock]) -> Message:
    """Add blocks behind what the user wrote; `replay` shows the user's own blocks only."""
    if not blocks:
        return message
    notes: Notes = {"blocks": [to_note(block) for block in to_blocks(message)]}
    return {
        **message,
        "content": join_content(message.get("content"), to_plain_message(blocks).get("content")),
        "crow": notes | message.get("crow", {}),
    }


def to_plain_message(blocks: Sequence[ContentBlock]) -> Message:
    """Convert blocks to a user message without notes."""
    parts: list[dict[str, Any]] = []
    for block in blocks:
        match block:
            case TextBlock(text=text):
                parts.append(to_text_part(text))
            case ImageBlock(data=data):
                parts.append(read_image(data))
            case ResourceLinkBlock():
                parts.append(to_text_part(link_to_text(block)))
            case ResourceBlock(resource=resource):
                name = path_from_uri(resource.uri)
                if resource.text is not UNSET:
                    parts.append(to_text_part(f'<resource uri="{name}">\n{resource.text}\n</resource>'))
                elif str(resource.mime_type or "").startswith("image/") and resource.blob is not UNSET:
                    parts.append(read_image(str(resource.blob)))
                else:
                    size = len(str(resource.blob or "")) * 3 // 4
                    parts.append(to_text_part(f"[attached: {name}, {size} bytes that are neither text nor an image]"))
            case AudioBlock(data=data, mime_type=mime_type):
                parts.append(to_audio_part(data, mime_type))
            case _:
                parts.append(to_text_part("[attached: something this agent does not know]"))
    parts = [part for part in parts if part != to_text_part("")]  # which some servers refuse
    if all(part["type"] == "text" for part in parts):
        return {"role": "user", "content": "\n\n".join(part["text"] for part in parts)}
    return {"role": "user", "content": parts}


def to_text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def read_image(data: str) -> dict[str, Any]:
    """Convert an image in base64 to a part with the type that its bytes show, or to a text that says what is wrong."""
    try:
        return to_image_part("".join(data.split()), find_image_type(data))
    except ValueError as error:
        return to_text_part(f"[an image that was left out: it {error}]")


def find_image_type(data: str) -> str:
    """Find the MIME type of an image in base64 by its bytes.

    Raises ValueError for what no model can read; its text completes "the image …".
    """
    if len(data) // 4 * 3 > IMAGE_LIMIT:
        raise ValueError(f"is longer than {IMAGE_LIMIT // 1_000_000} MB")
    try:
        start = b64decode("".join(data.split()), validate=True)[:32]
    except ValueError:
        raise ValueError("is not valid base64") from None
    if (known := next((kind for kind, signature in IMAGE_SIGNATURES if signature.match(start)), None)) is None:
        kinds = ", ".join(kind.removeprefix("image/") for kind, _ in IMAGE_SIGNATURES)
        raise ValueError(f"is not of a known kind ({kinds})" if start else "is empty")
    return known


def to_image_part(data: str, mime_type: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:{mime_type};base64,{data}"}}


def to_audio_part(data: str, mime_type: str) -> dict[str, Any]:
    kind = mime_type.partition(";")[0].strip().lower().partition("/")[2].removeprefix("x-")
    format = {"mpeg": "mp3", "wave": "wav", "vnd.wave": "wav"}.get(kind, kind)
    return {"type": "input_audio", "input_audio": {"data": data, "format": format}}


def link_to_text(link: ResourceLinkBlock) -> str:
    """Write a link as Markdown; a local file is named by its path, which the model can open."""
    name = path_from_uri(link.uri)
    title = link.title if isinstance(link.title, str) else link.name
    return f"[{title}]({name})" if title and title != name else name


def path_from_uri(uri: str) -> str:
    """Convert a `file:` URI to a path, with its line range if it has one; return any other URI unchanged."""
    try:
        split = urlsplit(uri)
    except ValueError:
        return uri
    if split.scheme != "file":
        return uri
    return from_uri(split.netloc, split.path) + (f"#{split.fragment}" if split.fragment else "")


def to_announcement(tool_call: ToolCall, cwd: str) -> schema.ToolCall:
    """Convert a tool call to the ACP update that announces it; `rawInput` holds all of its arguments."""
    path = tool_call.arguments.get("path")
    line = find_line(tool_call.arguments)
    locations = [ToolCallLocation(path=str(Path(cwd, path)), line=line)] if isinstance(path, str) and path else UNSET
    return schema.ToolCall(
        tool_call_id=tool_call.id,
        title=tool_call.title,
        name=tool_call.name,
        kind=tool_call.kind,
        status="pending",
        locations=locations,
        raw_input=tool_call.raw_input,
    )


def to_early_announcement(tool_call: ToolCall) -> schema.ToolCall:
    """Convert a tool call whose arguments are still arriving to the ACP update that announces it."""
    title = tool_call.tool_title or to_line(tool_call.name[:200])
    return schema.ToolCall(
        tool_call_id=tool_call.id, title=title, name=tool_call.name, kind=tool_call.kind, status="pending"
    )


def find_line(arguments: dict[str, Any]) -> int | UnsetType:
    """Find the line, from 1, that a call will read or change first; UNSET if its arguments do not tell."""
    match arguments:
        case {"view_range": [line, _]}:
            pass
        case {"insert_line": int(above)}:
            line = above + 1
        case _:
            return UNSET
    return line if type(line) is int and 0 < line < 2**32 else UNSET


def to_update(result: ToolResult, tool_call: ToolCall) -> ToolCallUpdate:
    """Convert the result of a tool call to the ACP update that ends the call.

    It shows the diffs of what changed and the client's terminal; failing these, or on an error, the tool's own content.
    A command with an exit status other than 0 has failed, as in an editor's own terminals.
    """
    content: list[ToolCallContent] = [
        DiffContent(
            path=change["path"],
            old_text=change["old"],
            new_text=change["new"] or "",
            meta=UNSET if change["new"] is not None else {"crow": {"deleted": True}},
        )
        for change in result.meta.get("crow/changes", [])
    ]
    if terminal := result.meta.get("crow/terminal"):
        content.append(TerminalContent(terminal_id=terminal))
    shows_text = result.is_error or not content or (tool_call.kind == "execute" and not terminal)
    if shows_text:
        content += [BlockContent(content=to_block(block, tool_call.kind)) for block in result.content]
    locations = [
        ToolCallLocation(path=place["path"], line=place.get("line", UNSET))
        for place in result.meta.get("crow/locations", [])
    ]
    return ToolCallUpdate(
        tool_call_id=tool_call.id,
        status="failed" if result.is_error or result.meta.get("crow/exit") else "completed",
        title=result.meta.get("crow/title", UNSET),
        content=content,
        locations=locations or UNSET,
        raw_output=to_raw_output(result, with_text=not shows_text),
        meta={"crow": {"denied": result.meta["crow/denied"]}} if "crow/denied" in result.meta else UNSET,
    )


def to_raw_output(result: ToolResult, *, with_text: bool) -> dict[str, Any] | UnsetType:
    """Convert a result to `rawOutput`, with the names of ACP's `terminal/output`; UNSET if nothing is to be told.

    It has the text, cut in the middle, unless the content of the update shows that: some clients print both.
    `exitStatus` is there for a command that failed.
    """
    raw: dict[str, Any] = {}
    if with_text:
        text = clean_lines("\n\n".join(filter(None, map(to_text, result.content))))
        raw = {"output": text}
        if len(text) > RAW_OUTPUT_LIMIT:
            raw = {"output": shorten_middle(text, RAW_OUTPUT_LIMIT, "\n\n[…]\n\n"), "truncated": True}
    if status := result.meta.get("crow/exit"):
        raw["exitStatus"] = status
    return raw or UNSET


def to_block(block: dict[str, Any], kind: ToolKind) -> ContentBlock:
    """Convert an MCP content block to an ACP one. The output of a command is fenced, as it is not Markdown."""
    match block:
        case {"type": "text", "text": str(text)}:
            return TextBlock(text=fence(text.removesuffix("\n")) if kind == "execute" else text)
        case {"type": "image", "data": str(data), "mimeType": str(mime_type)}:
            return ImageBlock(data=data, mime_type=mime_type)
        case {"type": "audio", "data": str(data), "mimeType": str(mime_type)}:
            return AudioBlock(data=data, mime_type=mime_type)
        case {"type": "resource_link", "uri": str(), "name": str()} | {"type": "resource", "resource": {"uri": str()}}:
            try:
                return convert_leniently(
                    block, ResourceLinkBlock if block["type"] == "resource_link" else ResourceBlock
                )
            except ValidationError:
                return TextBlock(text=to_text(block))
        case _:
            return TextBlock(text=to_text(block))


def to_tool_message(result: ToolResult, tool_call: ToolCall) -> Message:
    """Convert a result to the tool message that answers the call.

    The notes keep what `to_result` needs to show the call again. A terminal is left out: it will not exist then.
    """
    shown: ShownCall = {"kind": tool_call.kind}
    if tool_call.tool_title:
        shown["title"] = tool_call.tool_title
    if tool_call.arguments != tool_call.original:
        shown["arguments"] = tool_call.arguments
    if any(block.get("type") != "text" for block in result.content):
        shown["blocks"] = result.content
    if title := result.meta.get("crow/title"):
        shown["call"] = title
    if places := result.meta.get("crow/locations"):
        shown["locations"] = places
    if status := result.meta.get("crow/exit"):
        shown["exit"] = status
    notes: Notes = {"shown": shown}
    if changes := result.meta.get("crow/changes"):
        notes["changes"] = changes
    if (stays := result.meta.get("crow/stays")) is not None:
        notes["stays"] = stays
    if shell := result.meta.get("crow/shell"):
        notes["shell"] = shell
    if (plan := result.meta.get("crow/plan")) is not None:
        notes["plan"] = plan
    if result.is_error:
        notes["failed"] = True
    return answer_tool_call(tool_call.use, to_content(result), **notes)


def to_interruption(tool_call: ToolCall, *, begun: bool = True) -> Message:
    """Make the tool message that answers a call which was interrupted; it had no effects if it had not `begun`."""
    return to_tool_message(ToolResult.error(INTERRUPTED if begun else NOT_RUN), tool_call)


def to_failure(tool_call: ToolCall, *, begun: bool) -> ToolCallUpdate:
    """Make the ACP update that ends a call without a result, and says so if it had not `begun`."""
    meta = UNSET if begun else {"crow": {"notRun": True}}
    return ToolCallUpdate(tool_call_id=tool_call.id, status="failed", meta=meta)


def to_result(message: Message) -> ToolResult:
    """Convert a message that `to_tool_message` made back to a result."""
    notes = message.get("crow", {})
    seen = notes.get("shown", {})
    blocks = seen.get("blocks") or [to_text_part(part.get("text", "")) for part in to_parts(message.get("content"))]
    meta: ResultMeta = {
        "crow/changes": notes.get("changes", []),
        "crow/locations": seen.get("locations", []),
        "crow/exit": seen.get("exit", {}),
    }
    if title := seen.get("call"):
        meta["crow/title"] = title
    return ToolResult(blocks, bool(notes.get("failed")), meta)


def replay(log: Sequence[Message], cwd: str, *, compactions: bool = False, start: str = "") -> Iterator[SessionUpdate]:
    """Convert a log to the updates that show a client the conversation, with each tool call in its last state.

    `compactions` includes compactions. `start` is the id of the first message. Raises LookupError if there is none.
    """
    entries = drop_rewound(log)
    ids = [entry.get("crow", {}).get("id") for entry in entries if start]
    if start and start not in ids:
        raise LookupError(f"The conversation has no message {start[:100]!r}. Load it from its start.")
    return replay_entries(entries[ids.index(start) if start else 0 :], cwd, compactions)


def replay_entries(entries: Sequence[Message], cwd: str, compactions: bool) -> Iterator[SessionUpdate]:
    """Convert entries to updates, as `replay` does."""
    answers = {entry.get("tool_call_id"): entry for entry in entries if entry.get("role") == "tool"}
    tasks = {entry.get("crow", {}).get("call") for entry in entries if marker_kind(entry) == "task"}
    for entry in entries:
        id = (notes := entry.get("crow", {})).get("id", UNSET)
        match entry.get("role"):
            case "user" if not notes.get("hidden"):
                yield from (UserMessageChunk(content=block, message_id=id) for block in to_blocks(entry))
            case "assistant":
                if text := entry.get("reasoning_content"):
                    yield AgentThoughtChunk(content=TextBlock(text=text), message_id=id)
                if text := entry.get("content"):
                    yield AgentMessageChunk(content=TextBlock(text=str(text)), message_id=id)
                if notes.get("cut") in ("interrupted", "cancelled"):
                    yield AgentThoughtChunk(content=TextBlock(text="Interrupted here.\n"), message_id=f"{id}-cut")
                for use in map(unwrap_proxy_call, name_raw_calls(entry)):
                    reason = LEFT_TO_SERVER if use["id"] in tasks else INTERRUPTED
                    answer = answers.get(use["id"]) or answer_tool_call(use, reason, failed=True)
                    yield from replay_call(use, answer, cwd)
            case _ if marker_kind(entry) == "inner" and "use" in notes and "answer" in notes:
                yield from replay_call(cast("RawToolCall", notes["use"]), cast("Message", notes["answer"]), cwd)
            case _ if compactions and marker_kind(entry) == "compaction":
                yield CompactionUpdate(compaction_id=str(id), status="completed")
            case _:
                pass


def replay_call(use: RawToolCall, message: Message, cwd: str) -> Iterator[SessionUpdate]:
    """Convert a tool call and the message that answers it to updates."""
    seen = message.get("crow", {}).get("shown", {})
    arguments, kind = seen.get("arguments", parse_arguments(use)), seen.get("kind", "other")
    tool_call = ToolCall(use, arguments or {}, arguments is not None, kind, seen.get("title", ""))
    yield to_announcement(tool_call, cwd)
    if (plan := message.get("crow", {}).get("plan")) is not None:
        yield PlanUpdate(entries=convert_leniently(plan, list[PlanEntry]))
    not_run = message.get("content") == NOT_RUN
    yield to_failure(tool_call, begun=False) if not_run else to_update(to_result(message), tool_call)


def to_blocks(message: Message) -> list[ContentBlock]:
    """Convert a user message back to the blocks it was made of."""
    data = iter([text for part in to_parts(message.get("content")) if (text := find_data(part)) is not None])
    filled: list[dict[str, Any]] = []
    for block in message.get("crow", {}).get("blocks") or to_parts(message.get("content")):
        match block:
            case {"type": "image_url", "image_url": {"url": str(url)}}:
                mime_type = url.removeprefix("data:").partition(";")[0]
                filled.append({"type": "image", "mimeType": mime_type, "data": next(data, "")})
            case {"type": "image" | "audio"}:
                filled.append({**block, "data": next(data, "")})
            case {"type": "resource", "resource": {**resource}} if "text" not in resource:
                blob = next(data, "") if str(resource.get("mimeType")).startswith("image/") else ""
                filled.append({**block, "resource": {**resource, "blob": blob}})
            case _:
                filled.append(block)
    return convert_leniently(filled, list[ContentBlock])


def find_data(part: dict[str, Any]) -> str | None:
    """Find the base64 data in a part of a message; None for text."""
    match part:
        case {"type": "image_url", "image_url": {"url": url}}:
            return str(url).partition(",")[2]
        case {"type": "input_audio", "input_audio": {"data": data}}:
            return str(data)
        case _:
            return None


def to_note(block: ContentBlock) -> dict[str, Any]:
    """Convert a block to the form that a message's notes keep: without data, which the message itself holds."""
    known: dict[str, Any] = to_builtins(block, enc_hook=to_raw)
    match known:
        case {"resource": {"blob": _, **resource}}:
            return {**known, "resource": resource}
        case _:
            return {key: value for key, value in known.items() if key != "data"}


def to_content(result: ToolResult) -> str | list[dict[str, Any]]:
    """Convert a result to the content of a tool message: text, or parts if there are images."""
    parts = [to_part(block) for block in result.content]
    if all(part["type"] == "text" for part in parts):
        return "\n\n".join(part["text"] for part in parts if part["text"]) or "(no output)"
    return parts


def to_part(block: dict[str, Any]) -> dict[str, Any]:
    """Convert an MCP content block to a part of a message: an image, or text."""
    match block:
        case {"type": "image", "data": str(data)}:
            return read_image(data)
        case {"type": "resource", "resource": {"blob": str(data), "mimeType": str(kind)}} if kind.startswith("image/"):
            return read_image(data)
        case _:
            return to_text_part(to_text(block))


def to_text(block: dict[str, Any]) -> str:
    """Describe an MCP content block in text."""
    match block:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "resource", "resource": {"text": str(text)}}:
            return text
        case {"type": "resource", "resource": {"uri": uri, "blob": str(blob)}}:
            return f"[{to_line(str(uri))}: {len(blob) * 3 // 4} bytes that are neither text nor an image]"
        case {"type": "resource_link", "uri": uri}:
            described = block.get("title") or block.get("description")
            return to_line(f"[{block.get('name', uri)}]({uri})" + (f": {described}" if described else ""))
        case {"type": "audio", "data": str(data)}:
            kind = block.get("mimeType", "audio")
            return f"[a sound, {to_line(str(kind))}, {len(data) * 3 // 4} bytes: the user hears it, you cannot]"
        case {"type": kind}:
            return f"[{kind} content that cannot be shown as text]"
        case _:
            return str(block)


def find_first_text(message: Message) -> str:
    """The first words of a prompt, whatever is attached to it."""
    return next((block.text for block in to_blocks(message) if isinstance(block, TextBlock)), "")


def make_title(entries: Iterable[Message]) -> str:
    """Make the title of a session from the first words of its first prompt, of at most TITLE_LIMIT characters."""
    first = next((find_first_text(entry) for entry in entries if entry.get("role") == "user"), "")
    words = to_line(" ".join(first.split()))
    return shorten_line(words, TITLE_LIMIT)
