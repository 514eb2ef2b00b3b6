"""The params of a client's requests: checked, and converted to what the app takes. Every fault is an RpcError."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, TypeAlias, TypeVar

from msgspec import ValidationError

from crow_core.acp.connection import RpcError
from crow_core.acp.decoding import convert_leniently
from crow_core.acp.schema import (
    INVALID_PARAMS,
    AudioBlock,
    ContentBlock,
    ForkSessionRequest,
    ImageBlock,
    LoadSessionRequest,
    NewSessionRequest,
    ResourceBlock,
    ResumeSessionRequest,
    TextBlock,
    Unknown,
)
from crow_core.content import find_image_type
from crow_core.mcp.server_source import from_acp
from crow_core.messages.notes import Notes, OutputNotes
from crow_core.session.options import Option
from crow_core.session.output import check_schema
from crow_core.session.store import ArchiveFilter
from crow_core.text import to_line

T = TypeVar("T")

OUTPUT_RETRIES = 2
"""Times that a result which does not fit is asked for again, unless the client says otherwise."""
SESSION_ID = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{,63}")
"""Matches an id that a client in this process may choose for a session; it is also part of names of files."""

OpenRequest: TypeAlias = NewSessionRequest | LoadSessionRequest | ResumeSessionRequest | ForkSessionRequest


def wants_version_2(params: Mapping[str, Any]) -> bool:
    """Find out whether a client that sends `initialize` speaks version 2 of ACP.

    Version 2 requires `info`. A client that names the version without it is answered with version 1.
    """
    return params.get("protocolVersion") == 2 and "info" in params


def parse_params(params: Mapping[str, Any], kind: type[T]) -> T:
    """Convert the params of a request. Raises RpcError."""
    try:
        return convert_leniently(params, kind)
    except ValidationError as error:
        raise RpcError(INVALID_PARAMS, f"Invalid params: {error}") from error


def parse_replay_start(meta: Any) -> str:
    """Find the id of the message from which on a client of version 1 wants a session, in `_meta.crow.replayFrom`.

    "" for the start of the session. Raises RpcError.
    """
    match meta:
        case {"crow": {"replayFrom": {**wanted}}}:
            return parse_replay_from(wanted)
        case _:
            return ""


def parse_replay_from(wanted: Any) -> str:
    """Parse version 2's `replayFrom`: the id of the first message to replay; "" for the start of the session.

    Crow's own variant `_message` has that as `messageId`. Raises RpcError.
    """
    match wanted:
        case {"type": "start"}:
            return ""
        case {"type": "_message", "messageId": str(id)} if id:
            return id
        case _:
            details = "Its type is 'start', or '_message' with a `messageId`."
            raise RpcError(INVALID_PARAMS, "Unknown replayFrom", details=details)


def parse_folders_and_servers(params: OpenRequest) -> dict[str, Any]:
    """Parse the additional folders and the MCP servers that a client wants in a session."""
    return {
        "roots": [check_folder(root) for root in params.additional_directories or []],
        "servers": [from_acp(server, params.cwd) for server in params.mcp_servers or []],
    }


def parse_instructions(params: OpenRequest) -> tuple[str, str] | None:
    """Parse the client's system prompt: its mode and its text; None if there is none."""
    if not (prompt := params.system_prompt):
        return None
    if prompt.mode not in ("append", "override"):
        raise RpcError(INVALID_PARAMS, "Unknown system prompt mode", details="It is one of: append, override.")
    texts = [block.text for block in prompt.content if isinstance(block, TextBlock)]
    if not texts or len(texts) < len(prompt.content):
        raise RpcError(INVALID_PARAMS, "Unusable system prompt", details="It takes text blocks, at least one.")
    return prompt.mode, "\n\n".join(texts)


def parse_archive_filter(text: str) -> ArchiveFilter:
    """Parse the client's wish for archived sessions. Raises RpcError."""
    if text in ("exclude", "include", "only"):
        return text
    raise RpcError(INVALID_PARAMS, "Unknown archive filter", details="It is one of: exclude, include, only.")


def parse_choice(option: Option | None, value: str | bool) -> tuple[Option, str]:
    """Return an option of a session, and the one of its choices that the client wants."""
    if option is None:
        raise RpcError(INVALID_PARAMS, "Unknown option", details="No such option in this session.")
    if option.is_switch and isinstance(value, bool):
        value = "on" if value else "off"
    values = [choice.value for choice in option.choices]
    if value not in values:
        raise RpcError(INVALID_PARAMS, "Unknown value", details=f"{option.id} takes one of: {', '.join(values)}.")
    return option, str(value)


def check_prompt(blocks: Sequence[ContentBlock], *, audio: bool) -> None:
    """Check that a prompt is not empty, and has only content that `initialize` has announced. Raises RpcError."""
    details = ""
    if not any(block.text.strip() if isinstance(block, TextBlock) else True for block in blocks):
        details = "The prompt is empty."
    for index, block in enumerate(blocks):
        if isinstance(block, Unknown):
            details = f"prompt[{index}] has the unknown type {to_line(str(block.raw.get('type'))[:100])!r}."
        elif isinstance(block, AudioBlock) and not audio:
            details = f"prompt[{index}] is audio, which was not announced in promptCapabilities."
        elif (data := find_image_data(block)) is not None:
            try:
                find_image_type(data)
            except ValueError as error:
                details = f"The image in prompt[{index}] {error}."
    if details:
        raise RpcError(INVALID_PARAMS, "Unusable prompt", details=details)


def find_image_data(block: ContentBlock) -> str | None:
    """Find the base64 data of an image, also of an embedded one; None for other content."""
    match block:
        case ImageBlock(data=data):
            return data
        case ResourceBlock(resource=resource) if str(resource.mime_type or "").startswith("image/") and resource.blob:
            return str(resource.blob)
        case _:
            return None


def parse_prompt_notes(meta: Mapping[str, Any], *, takes_output: bool) -> Notes:
    """Parse `_meta.crow` of a prompt: the result that is wanted, and the client's name for the prompt. Raises
    RpcError."""
    notes: Notes = {}
    if output := parse_output(meta, possible=takes_output):
        notes["output"] = output
    match meta:
        case {"crow": {"sent": str(sent)}}:
            notes["sent"] = sent[:100]
        case _:
            pass
    return notes


def parse_output(meta: Mapping[str, Any], *, possible: bool) -> OutputNotes | None:
    """Parse `_meta.crow` of a prompt: the JSON schema of the result, and how often one that does not fit is asked for
    again. Raises RpcError."""
    match meta:
        case {"crow": {"outputSchema": given, **others}}:
            schema, retries = given, others.get("outputRetries", OUTPUT_RETRIES)
        case _:
            return None
    details = "" if possible else "The extension structured_output is off: [extensions] structured_output."
    if not isinstance(retries, int) or isinstance(retries, bool) or retries < 0:
        details = details or "outputRetries is not a number of attempts."
    try:
        check_schema(schema)
    except ValueError as error:
        details = details or f"The schema of the result cannot be used: {error}."
    if details:
        raise RpcError(INVALID_PARAMS, "Unusable output schema", details=details)
    return {"schema": schema, "retries": retries}


def check_id(id: str) -> str:
    """Return the id of a session if a store can hold it. Raises RpcError."""
    if not SESSION_ID.fullmatch(id):
        details = f"{id[:80]!r} is not an id. Give up to 64 letters, digits, '.', '_' or '-'; the first is no sign."
        raise RpcError(INVALID_PARAMS, "Unusable session id", details=details)
    return id


def check_folder(path: str) -> str:
    """Return the path if it is absolute and a folder. Raises RpcError.

    On Windows, a path without a drive, as "/", is on that of this process.
    """
    if not PurePath(path).root:
        raise RpcError(INVALID_PARAMS, "Not an absolute path", details=f"{path!r} is not an absolute path.")
    if not os.path.isdir(path):
        raise RpcError(INVALID_PARAMS, "No such folder", details=f"The folder {path!r} does not exist.")
    return path if PurePath(path).is_absolute() else os.path.abspath(path)
