"""Conversion of malformed and malicious pages."""

import gc
import sys
from contextlib import suppress
from pathlib import Path

import anyio
import pytest
from anyio.lowlevel import checkpoint
from crow_mcp_server.web.page_text import UnreadablePage, convert_feed, convert_html, decode_text, detect_kind, to_text
from hypothesis import given, settings
from hypothesis import strategies as st

WILD = settings(max_examples=settings.default.max_examples * 6 // 10)
HTML = (
    *("<p>", "</p>", "<a href='http://x[' >", "<a href='#x'>", "<a href='javascript:x'>", "<table>", "<tr>", "<td>"),
    *("<!--", "-->", "<![CDATA[", "<script>", "</script>", "<title>", "</title>", "&amp;", "&#0;", "&#xD800;", "\0"),
    *("<pre>", "<code>", "<svg>", "<html>", "<body>", "<base href='http://['>", "<a href='//[::1'>", "<ul><li>"),
    *("<?xml version='1.0' encoding='utf-16'?>", "word " * 40, "\ufffe"),
)
FEED = (
    *(b"<rss>", b"<channel>", b"<item>", b"<title>", b"</title>", b"<feed xmlns='http://www.w3.org/2005/Atom'>"),
    *(b"<entry>", b"<link href='x'/>", b"<summary type='html'>", b"&lt;p&gt;", b"&#x0;", b"&a;", b"</item>"),
    *(b"<!DOCTYPE x [<!ENTITY a 'aaa'>]>", b"<pubDate>x</pubDate>", b"<description>&lt;!--&gt;</description>"),
)


@WILD
@given(st.lists(st.sampled_from(HTML) | st.text(max_size=8), max_size=25).map("".join))
def test_any_html_gives_some_text(html: str):
    assert isinstance(convert_html(html, "https://example.com/a/b"), str)


@WILD
@given(st.lists(st.sampled_from(FEED) | st.binary(max_size=8), max_size=25).map(b"".join))
def test_any_feed_gives_its_entries_or_an_error(feed: bytes):
    with suppress(UnreadablePage):
        assert convert_feed(feed).startswith("# ")


@WILD
@given(
    st.binary(max_size=300),
    st.none() | st.text(max_size=10) | st.sampled_from(["utf-7", "idna", "hex", "utf-16", "replacement"]),
    st.booleans(),
)
def test_any_bytes_are_decoded_with_any_charset(body: bytes, charset: str | None, html: bool):
    assert isinstance(decode_text(body, charset, html=html), str)
    assert detect_kind(body, charset or "")


def test_kind_of_any_page_is_detected_quickly():
    assert detect_kind(b"<!---->" * 290 + b"x", "") == "text"
    assert detect_kind(b"<!-- crows --> <!---->" * 20 + b"<html>", "") == "html"


@pytest.mark.parametrize("steps", range(10))
def test_conversion_that_is_cancelled_at_any_moment_leaves_no_process(steps: int):
    async def cancel():
        async with anyio.create_task_group() as group:
            group.start_soon(to_text, b"<p>crow", "html", None, "https://example.com/")
            for _ in range(steps):
                await checkpoint()
            group.cancel_scope.cancel()

    anyio.run(cancel)
    gc.collect()  # warns of what was left behind


@pytest.mark.slow
@pytest.mark.anyio
async def test_feed_with_an_entity_bomb_does_not_grow():
    entities = "".join(f"<!ENTITY a{n} '{f'&a{n - 1};' * 10 if n else 'ha'}'>" for n in range(10))
    feed = f"<?xml version='1.0'?><!DOCTYPE rss [{entities}]><rss><channel><title>&a9;</title></channel></rss>"
    with suppress(UnreadablePage):
        assert len(await to_text(feed.encode(), "feed", None, "")) < 1_000


@pytest.mark.anyio
async def test_crash_of_a_parser_gives_an_error_in_one_line():
    with pytest.raises(UnreadablePage, match=r"it is not a valid PDF|it cannot be read \("):
        await to_text(
            b"%PDF-1.7\n1 0 obj <</Type/Catalog/Pages 1 0 R>> endobj trailer <</Root 1 0 R>>", "pdf", None, ""
        )


@pytest.mark.anyio
async def test_converting_process_does_not_inherit_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    reader = tmp_path / "reader"
    reader.write_text("#!/bin/sh\nenv\n")
    reader.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(reader))
    monkeypatch.setenv("BRAVE_API_KEY", "canary")
    told = await to_text(b"<p>Crows", "html", None, "https://example.com/")
    assert "PATH=" in told
    assert "canary" not in told
