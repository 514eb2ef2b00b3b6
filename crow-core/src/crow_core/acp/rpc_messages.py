"""The messages of JSON-RPC 2.0, as they are decoded and encoded."""

import json
import re
from codecs import utf_8_decode
from typing import Any, Literal

from msgspec import UNSET, DecodeError, Raw, Struct, UnsetType
from msgspec.json import Decoder

from crow_core.acp.schema import Error, RequestId


class IncomingMessage(Struct):
    """Any message; `params` and `result` stay raw until their type is known from the method."""

    jsonrpc: Literal["2.0"]
    id: RequestId | UnsetType = UNSET
    method: str | UnsetType = UNSET
    params: Raw = Raw(b"{}")
    result: Raw | UnsetType = UNSET
    error: Error | UnsetType | None = UNSET


class MalformedMessage(Struct):
    """The fields of a malformed message that show whether it is a request or an answer, and its id."""

    id: RequestId | UnsetType = UNSET
    method: Raw | UnsetType = UNSET
    result: Raw | UnsetType = UNSET
    error: Raw | UnsetType = UNSET


MESSAGE_DECODER = Decoder(IncomingMessage)
MALFORMED_DECODER = Decoder(MalformedMessage)
SYNTAX_DECODER = Decoder(Raw)
ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""An escaped surrogate, alone or as half of a valid pair."""


class OutgoingMessage(Struct, tag_field="jsonrpc", tag="2.0"):
    """Any message that this side sends."""


class OutgoingRequest(OutgoingMessage):
    id: int
    method: str
    params: Any


class OutgoingNotification(OutgoingMessage):
    method: str
    params: Any


class OutgoingResult(OutgoingMessage):
    id: RequestId
    result: Any


class OutgoingError(OutgoingMessage):
    id: RequestId
    error: Error


def decode_message(line: bytes | bytearray) -> IncomingMessage:
    """Return the message in a line; a lone surrogate, such as half an emoji, becomes `?`.

    Raises ValueError and RecursionError.
    """
    check_utf8(line)
    try:
        return MESSAGE_DECODER.decode(line)
    except DecodeError:
        if not ESCAPED_SURROGATE.search(line):
            raise
        return MESSAGE_DECODER.decode(json.dumps(json.loads(line), ensure_ascii=False).encode(errors="replace"))


def check_utf8(line: bytes | bytearray) -> None:
    """Raise UnicodeDecodeError if a line is not UTF-8, because msgspec does not check the values that it skips."""
    if line.isascii():
        return
    # Decode 1 MiB at a time: one emoji makes Python store four bytes for each character of the decoded text.
    at, window, view = 0, 1 << 20, memoryview(line)
    while at < len(line):
        at += utf_8_decode(view[at : at + window], "strict", at + window >= len(line))[1]
