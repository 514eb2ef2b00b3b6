"""What becomes of pages that nobody wrote for a parser."""

import sys
from contextlib import suppress
from pathlib import Path

import pytest
from crow_mcp_server.page import Unreadable, decode, from_feed, from_html, kind_of, read
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
    assert isinstance(from_html(html, "https://example.com/a/b"), str)


@WILD
@given(st.lists(st.sampled_from(FEED) | st.binary(max_size=8), max_size=25).map(b"".join))
def test_any_feed_gives_its_entries_or_a_reason(feed: bytes):
    with suppress(Unreadable):
        assert from_feed(feed).startswith("# ")


@WILD
@given(
    st.binary(max_size=300),
    st.none() | st.text(max_size=10) | st.sampled_from(["utf-7", "idna", "hex", "utf-16", "replacement"]),
    st.booleans(),
)
def test_any_bytes_are_decoded_whatever_charset_is_claimed(body: bytes, charset: str | None, html: bool):
    assert isinstance(decode(body, charset, html=html), str)
    assert kind_of(body, charset or "")


def test_no_beginning_of_a_page_takes_long_to_tell_what_it_is():
    assert kind_of(b"<!---->" * 290 + b"x", "") == "text"
    assert kind_of(b"<!-- crows --> <!---->" * 20 + b"<html>", "") == "html"


@pytest.mark.anyio
async def test_a_feed_that_grows_when_it_is_read_does_not():
    entities = "".join(f"<!ENTITY a{n} '{f'&a{n - 1};' * 10 if n else 'ha'}'>" for n in range(10))
    feed = f"<?xml version='1.0'?><!DOCTYPE rss [{entities}]><rss><channel><title>&a9;</title></channel></rss>"
    with suppress(Unreadable):
        assert len(await read(feed.encode(), "feed", None, "")) < 1_000


@pytest.mark.anyio
async def test_a_reader_that_falls_over_gives_a_reason_in_a_line():
    with pytest.raises(Unreadable, match=r"it is no sound PDF|it cannot be read \("):
        await read(b"%PDF-1.7\n1 0 obj <</Type/Catalog/Pages 1 0 R>> endobj trailer <</Root 1 0 R>>", "pdf", None, "")


@pytest.mark.anyio
async def test_a_reader_does_not_have_the_keys_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    reader = tmp_path / "reader"
    reader.write_text("#!/bin/sh\nenv\n")
    reader.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(reader))
    monkeypatch.setenv("BRAVE_API_KEY", "canary")
    told = await read(b"<p>Crows", "html", None, "https://example.com/")
    assert "PATH=" in told
    assert "canary" not in told
