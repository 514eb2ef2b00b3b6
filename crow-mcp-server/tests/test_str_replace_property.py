"""Whatever bytes a file holds: `str_replace` makes exactly the change, or none."""

import asyncio
import codecs
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from crow_mcp_server import create_server
from fastmcp import Client
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

MARKS = ["", "utf-8-sig", "utf-16-le", "utf-16-be"]
PIECES = st.sampled_from(["a", "b", "ab", "é", "日", "\n", "\r\n", "\r", " ", "\t", "\x0c", "\u2028", "\0", "x = 1"])
TEXTS = st.lists(PIECES, max_size=12).map("".join)
NEEDLES = st.lists(PIECES, min_size=1, max_size=4).map("".join)


def encoded(text: str, mark: str) -> bytes:
    prefix = {"utf-16-le": codecs.BOM_UTF16_LE, "utf-16-be": codecs.BOM_UTF16_BE}.get(mark, b"")
    return prefix + text.encode(mark or "utf-8")


FILES = st.one_of(st.binary(max_size=60), st.builds(encoded, TEXTS, st.sampled_from(MARKS)))


def line_feeds(text: str) -> str:
    return text.replace("\r\n", "\n")


@pytest.fixture
def replace() -> Iterator[Callable[[Path, str, str], Any]]:
    """`str_replace` on one server for all examples."""
    client = Client(create_server())
    with asyncio.Runner() as runner:
        runner.run(client.__aenter__())

        def call(path: Path, old: str, new: str) -> Any:
            arguments = {"command": "str_replace", "path": str(path), "old_str": old, "new_str": new}
            meta = {"crow/session": path.name, "crow/cwd": str(path.parent)}
            return runner.run(client.call_tool_mcp("file_editor", arguments, meta=meta))

        yield call
        runner.run(client.__aexit__(None, None, None))


@given(data=FILES, old=NEEDLES, new=TEXTS)
@example(data=b"a\r\nb\r\nc", old="b\n", new="x\ny\n")
@example(data=b"a\nb", old="a\nb", new="")
@example(data=b"\xff\xfea\0", old="a", new="b")
@example(data=b"b", old="b", new="\r\r\n")
@example(data=b"caf\xe9", old="caf", new="\u65e5")
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_file_gets_exactly_the_change_or_none(tmp_path, replace, data, old, new):
    path = tmp_path / uuid.uuid4().hex  # a file no example has seen before
    path.write_bytes(data)
    result = replace(path, old, new)
    after = path.read_bytes()
    if result.is_error:
        assert after == data
        return
    [change] = result.meta["crow/changes"]
    before_text, after_text = change["old"], change["new"]
    # The texts told are those of the file, byte for byte,
    mark, encoding = encoding_of(data, before_text)
    assert after == mark + after_text.encode(encoding)
    # the match was the only one,
    flat, needle = line_feeds(before_text), line_feeds(old)
    assert sum(flat.startswith(needle, at) for at in range(len(flat))) == 1
    # and it alone gave way to what was asked for, in some line ending.
    spellings = {line_feeds(new), line_feeds(new).replace("\n", "\r\n")}
    matches = [
        (start, end)
        for start in range(len(before_text))
        for end in range(start, len(before_text) + 1)
        if line_feeds(before_text[start:end]) == needle
    ]
    assert any(
        after_text.startswith(before_text[:start])
        and after_text.endswith(before_text[end:])
        and after_text[start : len(after_text) - len(before_text) + end] in spellings
        for start, end in matches
    )


def encoding_of(data: bytes, text: str) -> tuple[bytes, str]:
    """The byte order mark of the data, and the encoding in which a text is the rest of them."""
    for mark, encoding in (
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF32_LE, "utf-32-le"),
        (codecs.BOM_UTF32_BE, "utf-32-be"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
        (b"", "utf-8"),
        (b"", "latin-1"),
        (b"", "cp1252"),
    ):
        with suppress(UnicodeEncodeError):
            if data == mark + text.encode(encoding):
                return mark, encoding
    raise AssertionError(f"{text!r} is not what {data!r} holds")
