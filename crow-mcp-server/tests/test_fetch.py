"""The tool `fetch`, against a local server that behaves well or badly."""

import asyncio
import gzip
import io
import json
import os
import shutil
import ssl
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import crow_mcp_server
import httpcore2
import pytest
from crow_mcp_server import create_server
from crow_mcp_server.refusal import ToolRefusal
from crow_mcp_server.web import fetch, page_fetcher
from crow_mcp_server.web.fetch import to_tool_result
from crow_mcp_server.web.network import PublicNetwork
from crow_mcp_server.web.page_fetcher import PageFetcher
from crow_testing.listening import listen
from fastmcp import Client

pytestmark = pytest.mark.anyio

Write = Callable[[asyncio.StreamWriter], Awaitable[None]]
ARTICLE = """\
<!doctype html><html><head><title>Crows count</title></head><body>
<nav><a href="/">Home</a> <a href="/about">About us</a> <a href="/login">Log in</a></nav>
<main><article><h1>Crows count</h1>
<p>Carrion crows can be trained to caw a given number of times, which asks for planning and for control of the voice.
Researchers showed them numerals and sounds, and the birds answered with one to four caws before they pecked.</p>
<p>The <a href="papers/2024.html">whole study</a> has the numbers, and says how the birds made their few mistakes.</p>
<pre><code>def caw(times):
    for _ in range(times):
        print("caw")
</code></pre>
<table><tr><th>cue</th><th>caws</th></tr><tr><td>drum</td><td>4</td></tr></table>
</article></main>
<footer>Subscribe to our newsletter! Cookie settings</footer></body></html>"""


@dataclass
class Site:
    """A local server whose answers the test sets."""

    port: int = 0
    pages: dict[str, bytes | Write] = field(default_factory=dict[str, bytes | Write])
    asked: list[str] = field(default_factory=list[str])
    """The paths of the requests so far."""
    headers: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    connections: int = 0

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def url(self, path: str) -> str:
        return f"http://{self.host}{path}"

    def put(self, path: str, body: str | bytes, status: str = "200 OK", **headers: str) -> None:
        """Set the answer for a path; underscores in names of headers stand for dashes."""
        data = body.encode() if isinstance(body, str) else body
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(data)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.pages[path] = "\r\n".join(lines).encode() + b"\r\n\r\n" + data

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while lines := (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]:
                path = lines[0].split(" ")[1]
                self.asked.append(path)
                self.headers.append({k.lower(): v for k, _, v in (line.partition(": ") for line in lines[1:])})
                page = self.pages.get(path, b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                if isinstance(page, bytes):
                    writer.write(page)
                else:
                    await page(writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    site = Site()
    site.put("/article", ARTICLE, Content_Type="text/html; charset=utf-8")
    async with listen(site.answer) as site.port:
        yield site


@dataclass
class Result:
    text: str
    is_error: bool
    raw: Any


@dataclass
class Fetch:
    client: Client[Any]

    async def __call__(self, url: str, **arguments: Any) -> Result:
        answer = await self.client.call_tool_mcp("fetch", {"url": url} | arguments)
        text = "".join(block.text for block in answer.content if block.type == "text")
        return Result(text, answer.is_error, answer)

    async def read(self, url: str, **arguments: Any) -> str:
        """Return the text of a page that is expected to be readable."""
        result = await self(url, **arguments)
        assert not result.is_error, result.text
        return result.text

    async def get_error(self, url: str, **arguments: Any) -> str:
        """Return the error message for a page that is expected to be refused."""
        result = await self(url, **arguments)
        assert result.is_error, result.text
        return result.text


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the timeouts, because the machine may be busy with other tests."""
    monkeypatch.setattr(page_fetcher, "FETCH_TIMEOUT", 50.0)
    monkeypatch.setattr(fetch, "READ_TIMEOUT", 50.0)


@asynccontextmanager
async def fetching(**options: Any) -> AsyncIterator[Fetch]:
    async with Client(create_server(**options)) as client:
        yield Fetch(client)


@pytest.fixture
async def get(site: Site) -> AsyncIterator[Fetch]:
    """The tool `fetch`, allowed to reach the site."""
    async with fetching(allow_hosts=[site.host]) as fetch:
        yield fetch


# Conversion to text


async def test_page_becomes_markdown_without_navigation_and_footer(site: Site, get: Fetch):
    text = await get.read(site.url("/article"))
    assert text.startswith(f"{site.url('/article')}\n\n# Crows count\n")
    assert text.count("# Crows count") == 1
    assert "newsletter" not in text
    assert "About us" not in text
    assert f"[whole study]({site.url('/papers/2024.html')})" in text
    assert 'def caw(times):\n    for _ in range(times):\n        print("caw")' in text
    assert "| drum | 4 |" in text


async def test_raw_returns_the_source(site: Site, get: Fetch):
    text = await get.read(site.url("/article"), raw=True)
    assert ARTICLE in text


async def test_page_without_main_text_is_converted_whole(site: Site, get: Fetch):
    items = "".join(f"<li><a href='/{n}'>Item {n}</a></li>" for n in range(3))
    site.put("/list", f"<html><title>Menu</title><body><ul>{items}</ul></body></html>", Content_Type="text/html")
    text = await get.read(site.url("/list"))
    assert f"[Item 2]({site.url('/2')})" in text


async def test_structured_result_has_the_part_and_its_position(site: Site, get: Fetch):
    site.put("/long", "x" * 50_000, Content_Type="text/plain")
    result = await get(site.url("/long"), start=20_000)
    part = result.raw.structured_content
    assert (part["url"], part["type"], part["start"], part["total"]) == (
        site.url("/long"),
        "text/plain",
        20_000,
        50_000,
    )
    assert part["text"] == "x" * 20_000


async def test_long_page_comes_in_parts_of_the_same_text(site: Site, get: Fetch):
    whole = "".join(f"line {n}\n" for n in range(6_000))
    site.put("/long", whole, Content_Type="text/plain")
    pieces, start = [], 0
    while start < len(whole):
        result = await get(site.url("/long"), start=start)
        pieces.append(result.raw.structured_content["text"])
        start += len(pieces[-1])
        assert (f"call again with start={start}]" in result.text) == (start < len(whole))
    assert "".join(pieces) == whole
    assert site.asked.count("/long") == 1
    assert "there is nothing from" in await get.get_error(site.url("/long"), start=len(whole))


async def test_json_is_indented(site: Site, get: Fetch):
    site.put("/data", '{"name":"Krähe","legs":2}', Content_Type="application/vnd.api+json")
    assert '{\n  "name": "Krähe",\n  "legs": 2\n}' in await get.read(site.url("/data"))
    site.put("/broken", '{"name":', Content_Type="application/json")
    assert await get.read(site.url("/broken")) == f'{site.url("/broken")}\n\n{{"name":'
    site.put("/deep", "[" * 200_000, Content_Type="application/json")
    assert "[[[[" in await get.read(site.url("/deep"))


async def test_feed_becomes_a_list_of_entries(site: Site, get: Fetch):
    feed = """<?xml version="1.0"?><rss version="2.0"><channel><title>Crow news</title><item><title>A nest</title>
    <link>https://example.com/nest</link><pubDate>Sat, 21 Nov 2026 10:00:00 GMT</pubDate>
    <description>&lt;p&gt;High &lt;b&gt;up&lt;/b&gt;&lt;/p&gt;</description></item></channel></rss>"""
    site.put("/feed", feed, Content_Type="application/xml")
    text = await get.read(site.url("/feed"))
    assert "# Crow news\n\n## A nest\nhttps://example.com/nest\nSat, 21 Nov 2026 10:00:00 GMT\nHigh up" in text


def pdf(text: str) -> bytes:
    """Return a minimal PDF of one page."""
    stream = f"BT /F1 24 Tf 72 700 Td ({text}) Tj ET".encode()
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents 4 0 R/Resources<</Font<</F1 5 0 R>>>>>>",
        b"<</Length %d>>stream\n%s\nendstream" % (len(stream), stream),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    out = io.BytesIO(b"%PDF-1.4\n")
    out.seek(0, io.SEEK_END)
    places = []
    for number, each in enumerate(objects, 1):
        places.append(out.tell())
        out.write(b"%d 0 obj\n%s\nendobj\n" % (number, each))
    table = out.tell()
    out.write(b"xref\n0 6\n0000000000 65535 f \n" + b"".join(b"%010d 00000 n \n" % place for place in places))
    out.write(b"trailer<</Size 6/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % table)
    return out.getvalue()


async def test_pdf_is_read_page_by_page_with_any_media_type(site: Site, get: Fetch):
    site.put("/paper", pdf("Crows remember faces"), Content_Type="application/octet-stream")
    assert "[page 1 of 1]\nCrows remember faces" in await get.read(site.url("/paper"))
    site.put("/torn", pdf("x")[:60], Content_Type="application/pdf")
    assert "not a valid PDF" in await get.get_error(site.url("/torn"))


async def test_image_is_returned_as_an_image(site: Site, get: Fetch):
    site.put("/crow.png", b"\x89PNG\r\n\x1a\n1234", Content_Type="image/png")
    result = await get(site.url("/crow.png"))
    [about, image] = result.raw.content
    assert (image.type, image.mime_type) == ("image", "image/png")
    assert "12 bytes" in about.text


async def test_binary_content_is_refused_with_a_hint_at_the_terminal(site: Site, get: Fetch):
    site.put("/a.zip", b"PK\x03\x04\0\0", Content_Type="application/zip")
    said = await get.get_error(site.url("/a.zip"))
    assert "application/zip" in said
    assert "curl -o" in said


@pytest.mark.parametrize(
    ("body", "type"),
    [
        ("Grüße".encode("latin-1"), "text/plain; charset=iso-8859-1"),
        ("Grüße – “ja”".encode("cp1252"), "text/plain; charset=latin1"),
        ("Grüße".encode("utf-16"), "text/plain"),
        (b"\xef\xbb\xbf" + "Grüße".encode(), "text/plain; charset=latin1"),
        ("<html><meta charset='utf-8'><p>Grüße".encode("cp1252"), "text/html; charset=windows-1252"),
        ("<html><meta charset='windows-1252'><p>Grüße".encode("cp1252"), "text/html"),
        ("Grüße".encode(), "text/plain; charset=klingon"),
    ],
)
async def test_text_is_decoded_by_byte_order_mark_header_or_meta_tag(site: Site, get: Fetch, body: bytes, type: str):
    site.put("/text", body, Content_Type=type)
    assert "Grüße" in await get.read(site.url("/text"))


async def test_text_without_a_declared_charset_is_decoded_by_guessing(site: Site, get: Fetch):
    poem = "Ворона каркнула во всё воронье горло: сыр выпал, с ним была плутовка такова. " * 5
    site.put("/poem", poem.encode("cp1251"), Content_Type="text/plain")
    assert "каркнула" in await get.read(site.url("/poem"))


PAGES = [
    (
        "cp1252",
        "Les élèves ont passé la journée près de la forêt, où le garde leur a montré les traces d'un chevreuil.",
    ),
    ("latin-1", "Die Bürgermeisterin eröffnete am Samstag die neue Brücke über den Fluss für die Fußgänger."),
    ("cp1252", "El niño comió una manzana en la montaña. ¿Quién lo habría pensado? «Nadie» – dijo la señora."),
    ("latin-1", "A reunião começou às nove horas, mas ninguém trouxe a documentação até à próxima sessão."),
    ("latin-1", "På våren växer det små blåa blommor överallt i skogen, och barnen går till skolan längs ån."),
    ("latin-1", "Tänään sää on kylmä, mutta järven jää ei vielä kestä. Äiti lähti töihin ja söi päivällistä."),
    ("cp1252", "It’s a “smart” idea – isn’t it? The price is 25 € and the café is open. Don’t wait…"),
    ("cp1250", "Wczoraj wieczorem pojechaliśmy do Łodzi, żeby zobaczyć nową wystawę i spotkać się z przyjaciółmi."),
    ("iso-8859-2", "Včera večer jsme šli do divadla, kde hráli starou českou komedii. Líbilo se nám to, když čekali."),
    ("cp1250", "A gyerekek tegnap a kertben játszottak, este együtt néztük a tűzijátékot a folyó fölött."),
    ("cp1254", "Dün akşam sahilde yürüdük ve gemileri seyrettik. Sonra yağmur başladı ve herkes eve koştu."),
    ("cp1257", "Vakar vakare vaikščiojome krantine ir žiūrėjome į laivus. Paskui pradėjo lyti, visi nubėgo."),
    ("cp1251", "Вчера вечером мы гуляли по набережной и смотрели на корабли. Потом пошёл дождь."),
    ("koi8_r", "Вчера вечером мы гуляли по набережной и смотрели на корабли. Потом пошёл дождь."),
    ("iso-8859-5", "Вчера вечером мы гуляли по набережной и смотрели на корабли. Потом пошёл дождь."),
    ("koi8_u", "Учора ввечері ми гуляли набережною і дивилися на кораблі. Її дощ не злякав."),
    ("cp1253", "Χθες το βράδυ περπατήσαμε στην προκυμαία και κοιτάζαμε τα πλοία."),
    ("cp1255", "אתמול בערב טיילנו על הטיילת והסתכלנו על האוניות. אחר כך התחיל לרדת גשם."),
    ("cp1256", "مشينا مساء أمس على الكورنيش وشاهدنا السفن. ثم بدأ المطر وركض الجميع إلى البيت."),
    ("tis-620", "เมื่อวานตอนเย็นเราเดินเล่นริมน้ำและดูเรือ แล้วฝนก็ตกและทุกคนก็วิ่งกลับบ้าน"),
    ("shift_jis", "昨日の夜、私たちは港を散歩して船を見ました。その後、雨が降り始めました。"),
    ("euc_jp", "昨日の夜、私たちは港を散歩して船を見ました。その後、雨が降り始めました。"),
    ("iso-2022-jp", "昨日の夜、私たちは港を散歩して船を見ました。その後、雨が降り始めました。"),
    ("gb18030", "昨天晚上我们在码头散步，看着船。后来下雨了，大家都跑回家。"),
    ("big5", "昨天晚上我們在碼頭散步，看著船。後來下雨了，大家都跑回家。"),
    ("euc_kr", "어제 저녁에 우리는 부두를 산책하며 배를 보았다. 그 후 비가 내리기 시작했다."),
]


def enclose(text: str) -> str:
    """Return a page that does not name its charset."""
    return f"<html><head><title>A</title></head><body><a href='/'>Home</a><p>{text}</p><p>&copy; 2026</p></body></html>"


@pytest.mark.parametrize(("encoding", "text"), PAGES)
async def test_page_without_a_charset_is_read_in_its_encoding(site: Site, get: Fetch, encoding: str, text: str):
    site.put("/page", enclose(text).encode(encoding), Content_Type="text/html")
    assert text in await get.read(site.url("/page"), raw=True)
    site.put("/text", text.encode(encoding), Content_Type="text/plain")
    assert text in await get.read(site.url("/text"))


@pytest.mark.parametrize(("encoding", "text"), PAGES[::8])  # few, as each starts a process
async def test_markdown_of_a_page_without_a_charset_is_made_in_its_encoding(
    site: Site, get: Fetch, encoding: str, text: str
):
    site.put("/page", enclose(text).encode(encoding), Content_Type="text/html")
    assert text in await get.read(site.url("/page"))


async def test_xml_says_its_encoding_itself(site: Site, get: Fetch):
    body = "<?xml version='1.0' encoding='ISO-8859-2'?>\n<a>Ł</a>".encode("iso-8859-2")
    site.put("/a.xml", body, Content_Type="application/xml")
    assert "<a>Ł</a>" in await get.read(site.url("/a.xml"))


async def test_vendors_characters_of_a_declared_encoding_are_read(site: Site, get: Fetch):
    site.put("/a", "①〜 ㈱".encode("cp932"), Content_Type="text/plain; charset=shift_jis")
    assert "① ㈱" in (await get.read(site.url("/a"))).replace("〜", "").replace("～", "")


async def test_http_error_is_reported_with_the_servers_text(site: Site, get: Fetch):
    site.put("/broken", "Traceback: no such table", "500 Internal Server Error", Content_Type="text/plain")
    said = await get.get_error(site.url("/broken"))
    assert "answers 500 Internal Server Error" in said
    assert "no such table" in said
    site.put("/busy", "", "429 Too Many Requests", Retry_After="30")
    assert "wait 30 seconds" in await get.get_error(site.url("/busy"))


async def test_page_without_text_is_reported_as_such(site: Site, get: Fetch):
    site.put("/empty", "", Content_Type="text/html")
    assert await get.read(site.url("/empty")) == f"{site.url('/empty')}\n\n[the page has no text]"


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        ("<title>App</title><div id=root></div><script src=/a.js></script>", True),
        ("<body><noscript>You need to enable JavaScript to run this app.</noscript><SCRIPT>go()</SCRIPT>", True),
        ("<p>Please turn on JavaScript in your browser to see this page.</p>" * 3 + "<script>go()</script>", True),
        ("<p>Short.</p>", False),
        (f"<p>{'A page with text enough to read. ' * 9}</p><script>go()</script>", False),
    ],
)
async def test_page_that_needs_javascript_is_reported_as_such(site: Site, get: Fetch, body: str, hint: bool):
    site.put("/app", f"<html>{body}</html>", Content_Type="text/html")
    assert ("by JavaScript, which does not run here" in await get.read(site.url("/app"))) == hint
    assert "does not run here" not in await get.read(site.url("/app"), raw=True)


# robots.txt and caching


async def test_robots_txt_is_fetched_once_and_obeyed(site: Site, get: Fetch):
    site.put("/robots.txt", "User-agent: *\nDisallow: /private\nAllow: /", Content_Type="text/plain")
    site.put("/private/diary", "secret", Content_Type="text/plain")
    await get.read(site.url("/article"))
    said = await get.get_error(site.url("/private/diary"))
    assert "asks programs not to fetch" in said
    assert site.asked == ["/robots.txt", "/article"]


async def test_redirect_to_a_page_that_robots_txt_forbids_is_not_followed(site: Site, get: Fetch):
    site.put("/robots.txt", "User-agent: *\nDisallow: /private", Content_Type="text/plain")
    site.put("/away", "", "302 Found", Location="/private/diary")
    assert "asks programs not to fetch" in await get.get_error(site.url("/away"))
    assert "/private/diary" not in site.asked


async def test_only_the_beginning_of_an_endless_robots_txt_is_read(site: Site, get: Fetch):
    rules = "User-agent: *\nDisallow: /private\n" + "# and so on\n" * 100_000
    site.put("/robots.txt", rules, Content_Type="text/plain")
    await get.read(site.url("/article"))
    assert "asks programs not to fetch" in await get.get_error(site.url("/private/diary"))


@pytest.mark.parametrize(
    ("status", "allowed"), [("404 Not Found", True), ("403 Forbidden", False), ("503 Busy", False)]
)
async def test_unreadable_robots_txt_is_handled_as_rfc_9309_says(site: Site, get: Fetch, status: str, allowed: bool):
    site.put("/robots.txt", "", status)
    assert (await get(site.url("/article"))).is_error != allowed


async def test_robots_txt_that_redirects_to_another_host_is_not_followed(site: Site):
    site.put("/robots.txt", "", "302 Found", Location=f"http://localhost:{site.port}/elsewhere")
    async with fetching(allow_hosts=[site.host, f"localhost:{site.port}"], stay_on_host=True) as get:
        await get.read(site.url("/article"))
    assert site.asked == ["/robots.txt", "/article"]


async def test_prompt_of_a_user_ignores_robots_txt(site: Site, get: Fetch):
    site.put("/robots.txt", "User-agent: *\nDisallow: /", Content_Type="text/plain")
    prompt = await get.client.get_prompt("fetch", {"url": site.url("/article")})
    assert "Carrion crows" in prompt.messages[0].content.text
    assert site.asked == ["/article"]
    assert "user-initiated" in site.headers[0]["user-agent"]


async def test_option_ignores_robots_txt(site: Site):
    site.put("/robots.txt", "User-agent: *\nDisallow: /", Content_Type="text/plain")
    async with fetching(allow_hosts=[site.host], ignore_robots=True) as get:
        await get.read(site.url("/article"))
    assert site.asked == ["/article"]


async def test_unchanged_page_is_not_sent_again(site: Site, get: Fetch):
    site.put("/page", "one", Content_Type="text/plain", ETag='"1"', Last_Modified="Sat, 21 Nov 2026 10:00:00 GMT")
    assert "one" in await get.read(site.url("/page"))
    site.put("/page", "", "304 Not Modified")
    assert "one" in await get.read(site.url("/page"))
    assert site.headers[-1]["if-none-match"] == '"1"'
    assert site.headers[-1]["if-modified-since"] == "Sat, 21 Nov 2026 10:00:00 GMT"
    site.put("/page", "two", Content_Type="text/plain")
    assert "two" in await get.read(site.url("/page"))


async def test_page_with_no_store_is_not_cached(site: Site, get: Fetch):
    site.put("/page", "one", Content_Type="text/plain", ETag='"1"', Cache_Control="no-store")
    await get.read(site.url("/page"))
    await get.read(site.url("/page"))
    assert "if-none-match" not in site.headers[-1]


async def test_page_cache_is_bounded(site: Site, get: Fetch):
    for n in range(6):
        site.put(f"/{n}", b"x" * 8 * 1024 * 1024, Content_Type="text/plain", ETag=f'"{n}"')
        await get.read(site.url(f"/{n}"))
    await get.read(site.url("/5"))
    assert site.headers[-1]["if-none-match"] == '"5"'
    await get.read(site.url("/0"))
    assert "if-none-match" not in site.headers[-1]


# Servers that misbehave


async def test_redirects_are_followed(site: Site, get: Fetch):
    site.put("/a", "", "301 Moved Permanently", Location="b")
    site.put("/b", "", "307 Temporary Redirect", Location=site.url("/article#part"))
    assert (await get.read(site.url("/a"))).startswith(site.url("/article") + "\n")


async def test_endless_redirects_are_refused(site: Site, get: Fetch):
    for n in range(100):
        site.put(f"/{n}", "", "302 Found", Location=f"/{n + 1}")
    assert "redirects more than 10 times" in await get.get_error(site.url("/0"))
    assert len(site.asked) == 12  # with robots.txt


@pytest.mark.parametrize("to", ["file:///etc/passwd", "ftp://example.com/", "gopher://x/", "http://u:p@127.0.0.1/"])
async def test_redirect_to_a_scheme_other_than_http_is_refused(site: Site, get: Fetch, to: str):
    site.put("/away", "", "302 Found", Location=to)
    assert "Give" in await get.get_error(site.url("/away"))


@pytest.mark.parametrize("to", ["", "data:text/plain,x"])
async def test_redirect_to_an_invalid_url_is_reported(site: Site, get: Fetch, to: str):
    site.put("/away", "", "302 Found", Location=to) if to else site.put("/away", "", "302 Found")
    assert "answers 302 Found" in await get.get_error(site.url("/away"))


def bomb(kind: str) -> bytes:
    """Return 300 megabytes of zeros, compressed."""
    megabyte = bytes(1024 * 1024)
    packer = zlib.compressobj(9, wbits=31 if kind == "gzip" else 15)
    return b"".join(packer.compress(megabyte) for _ in range(300)) + packer.flush()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_decompression_bomb_is_refused_at_the_limit(site: Site, get: Fetch, encoding: str):
    site.put("/bomb", bomb(encoding), Content_Type="text/plain", Content_Encoding=encoding)
    assert "more than the 10,485,760 bytes" in await get.get_error(site.url("/bomb"))


@pytest.mark.parametrize("encoding", ["gzip, gzip", "br", "zstd", "gzip, br, gzip"])
async def test_double_and_unknown_compression_is_refused(site: Site, get: Fetch, encoding: str):
    site.put("/bomb", gzip.compress(gzip.compress(b"x")), Content_Type="text/plain", Content_Encoding=encoding)
    assert "does not unpack" in await get.get_error(site.url("/bomb"))


async def test_compressed_text_is_decompressed(site: Site, get: Fetch):
    site.put("/packed", gzip.compress(b"hello"), Content_Type="text/plain", Content_Encoding="gzip")
    assert "hello" in await get.read(site.url("/packed"))
    site.put("/torn", gzip.compress(b"hello")[2:], Content_Type="text/plain", Content_Encoding="gzip")
    assert "could not be read" in await get.get_error(site.url("/torn"))


async def test_endless_reply_is_refused_at_the_limit(site: Site, get: Fetch):
    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
            await writer.drain()

    site.pages["/endless"] = endless
    assert "more than the 10,485,760 bytes" in await get.get_error(site.url("/endless"))


async def test_reply_with_ten_thousand_headers_is_refused(site: Site, get: Fetch):
    headers = b"".join(b"X-Header-%d: some value\r\n" % n for n in range(10_000))
    site.pages["/headers"] = b"HTTP/1.1 200 OK\r\n" + headers + b"\r\n"
    assert "could not be read" in await get.get_error(site.url("/headers"))


async def test_slow_server_runs_into_the_timeout(site: Site, get: Fetch, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(page_fetcher, "FETCH_TIMEOUT", 0.5)

    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.01)

    site.pages["/slow"] = drip
    assert "took more than 0.5 seconds" in await get.get_error(site.url("/slow"))


async def test_endless_conversion_runs_into_the_timeout_and_its_process_is_killed(
    site: Site, get: Fetch, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fetch, "READ_TIMEOUT", 1.0)
    attributes = " ".join(f"a{n}=1" for n in range(200_000))
    site.put("/tangle", f"<html><p {attributes}>x", Content_Type="text/html")
    said = await get.get_error(site.url("/tangle"))
    assert "too much time" in said
    assert "raw=true" in said


async def test_pdf_that_takes_too_long_is_not_advised_to_be_read_raw(
    site: Site, get: Fetch, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fetch, "READ_TIMEOUT", 0.001)
    site.put("/a.pdf", b"%PDF-1.7\n", Content_Type="application/pdf")
    for raw in (False, True):
        said = await get.get_error(site.url("/a.pdf"), raw=raw)
        assert "too much time" in said
        assert "raw=true" not in said
        assert "curl -o" in said


@pytest.mark.parametrize(
    "reply",
    [b"", b"\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nshort", b"SSH-2.0-OpenSSH_9.2\r\n", b"\0" * 100],
)
async def test_reply_that_is_not_http_is_reported(site: Site, get: Fetch, reply: bytes):
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(reply)
        writer.close()

    site.pages["/odd"] = answer
    assert "could not be read" in await get.get_error(site.url("/odd"))


async def test_refused_connection_is_reported(site: Site, get: Fetch):
    async with fetching(allow_hosts=["127.0.0.1"]) as anywhere:
        assert "could not be read" in await anywhere.get_error("http://127.0.0.1:1/")


# Addresses that are refused


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.1",
        "2130706433",
        "0x7f000001",
        "0x7f.1",
        "017700000001",
        "0177.0.0.1",
        "0",
        "0.0.0.0",
        "localhost",
        "LOCALHOST",
        "localhost.",
        "127.0.0.1.",
        "127。0。0。1",
        "１２７.0.0.1",
        "ⓛocalhost",
        "[::1]",
        "[::]",
        "[0:0:0:0:0:0:0:1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[::127.0.0.1]",
        "[64:ff9b::127.0.0.1]",
        "[2002:7f00:1::]",
        "[fe80::1%25lo]",
        "%31%32%37.0.0.1",
    ],
)
async def test_no_spelling_of_this_machine_is_reached(site: Site, host: str):
    async with fetching() as get:
        assert (await get(f"http://{host}:{site.port}/article")).is_error
    assert site.connections == 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "FILE:///etc/passwd",
        "ftp://example.com/",
        "data:text/plain,x",
        "javascript:alert(1)",
        "example.com",
        "//example.com/",
        "http://",
        "http:///path",
        "",
        "http://[::1",
        "http://example.com:99999999/",
        "http://exa\0mple.com/",
        "http://example.com\r\nHost: localhost/",
        "http://user@example.com/",
        "http://example.com:80@127.0.0.1/",
        "https://user:password@example.com/",
    ],
)
async def test_url_that_is_not_on_the_web_is_refused(url: str):
    async with fetching() as get:
        said = await get.get_error(url)
    assert "Give" in said
    assert "password" not in said.replace("a password", "")


PUBLIC = "93.184.215.14"


class Switchboard(httpcore2.AsyncNetworkBackend):
    """Connects to the site instead of the given address, which it records."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.dialled: list[str] = []

    async def connect_tcp(self, host: str, port: int, *args: Any, **kwargs: Any) -> httpcore2.AsyncNetworkStream:
        self.dialled.append(host)
        stream = await httpcore2.AnyIOBackend().connect_tcp("127.0.0.1", self.site.port)
        return Wire(stream, host)


class Wire(httpcore2.AsyncNetworkStream):
    """A connection that claims to lead to the recorded address."""

    def __init__(self, stream: httpcore2.AsyncNetworkStream, peer: str) -> None:
        self.read, self.write, self.aclose = stream.read, stream.write, stream.aclose
        self._peer = peer
        self._info = stream.get_extra_info

    def get_extra_info(self, info: str) -> Any:
        names = {"client_addr": ("198.51.100.7", 1), "server_addr": (self._peer, 80)}
        return names.get(info) or self._info(info)


def names(table: Mapping[str, list[str]]) -> Callable[[str, int], Awaitable[list[str]]]:
    """Return a resolver for these names. Each query of a name yields its next answer; addresses are comma separated."""

    async def resolve(host: str, port: int) -> list[str]:
        answers = table[host]
        return (answers.pop(0) if len(answers) > 1 else answers[0]).split(",")

    return resolve


async def test_public_host_is_reached_at_the_checked_address(site: Site):
    board = Switchboard(site)
    fetcher = PageFetcher(PublicNetwork(resolve=names({"example.com": [f"10.0.0.1,{PUBLIC}"]}), dial=board))
    result = await to_tool_result(await fetcher.fetch("http://example.com/article"), start=0, raw=False)
    assert "Carrion crows" in result.content[0].text
    assert set(board.dialled) == {PUBLIC}
    assert site.headers[0]["host"] == "example.com"


async def test_host_that_changes_its_address_in_between_is_refused(site: Site):
    board = Switchboard(site)
    site.put("/again", "", "302 Found", Location="http://rebind.test/article", Connection="close")
    site.pages["/again"] = site.pages["/again"]
    table = {"rebind.test": [PUBLIC, "127.0.0.1"], "start.test": [PUBLIC]}
    fetcher = PageFetcher(PublicNetwork(resolve=names(table), dial=board), obey_robots=False)
    await fetcher.fetch("http://rebind.test/article")
    with pytest.raises(ToolRefusal, match="not on the public internet"):
        await fetcher.fetch("http://start.test/again")
    assert set(board.dialled) == {PUBLIC}


@pytest.mark.parametrize("to", ["http://127.0.0.1/", "http://inside.test/", "http://[::ffff:169.254.169.254]/latest"])
async def test_redirect_to_a_private_address_is_refused(site: Site, to: str):
    board = Switchboard(site)
    site.put("/away", "", "302 Found", Location=to)
    table = {"example.com": [PUBLIC], "inside.test": ["192.168.1.1,fd00::1"]} | {
        host: [host] for host in ("127.0.0.1", "::ffff:169.254.169.254", "::ffff:a9fe:a9fe")
    }
    fetcher = PageFetcher(PublicNetwork(resolve=names(table), dial=board), obey_robots=False)
    with pytest.raises(ToolRefusal, match="not on the public internet"):
        await fetcher.fetch("http://example.com/away")
    assert set(board.dialled) == {PUBLIC}


async def test_public_address_of_this_machine_is_refused(site: Site):
    class Own(Wire):
        def get_extra_info(self, info: str) -> Any:
            return (PUBLIC, 80) if info.endswith("_addr") else super().get_extra_info(info)

    class Board(Switchboard):
        async def connect_tcp(self, *args: Any, **kwargs: Any) -> httpcore2.AsyncNetworkStream:
            return Own(await super().connect_tcp(*args, **kwargs), PUBLIC)

    fetcher = PageFetcher(PublicNetwork(resolve=names({"example.com": [PUBLIC]}), dial=Board(site)))
    with pytest.raises(ToolRefusal, match="not on the public internet"):
        await fetcher.fetch("http://example.com/article")
    assert site.asked == []


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("openssl"), reason="There is no openssl to make a certificate with.")
async def test_certificate_is_checked_for_the_name_although_an_address_is_connected(tmp_path: Path):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    files = ["-keyout", str(key), "-out", str(certificate), "-days", "2"]
    name = ["-subj", "/CN=crow", "-addext", "subjectAltName=DNS:localhost"]
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *files, *name]
    await anyio.run_process(make)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    site = Site()
    site.put("/article", ARTICLE, Content_Type="text/plain")
    script = (
        "import asyncio, sys\nfrom crow_mcp_server import create_server\nfrom fastmcp import Client\n"
        "async def main():\n"
        "    async with Client(create_server(allow_hosts=['localhost', '127.0.0.1'])) as client:\n"
        "        for url in sys.argv[1:]:\n"
        "            print((await client.call_tool_mcp('fetch', {'url': url})).content[0].text)\n"
        "asyncio.run(main())"
    )
    env = {**os.environ, "SSL_CERT_FILE": str(certificate)}
    async with listen(site.answer, tls=tls) as port:
        urls = [f"https://localhost:{port}/article", f"https://127.0.0.1:{port}/article"]
        ran = await anyio.run_process([sys.executable, "-c", script, *urls], env=env)
    known, unknown = ran.stdout.decode().split("https://127.0.0.1")
    assert "Carrion crows" in known
    assert "could not be read" in unknown
    assert "certificate" in unknown


async def test_allowed_host_may_be_limited_to_one_port(site: Site):
    async with fetching(allow_hosts=[site.host]) as get:
        await get.read(site.url("/article"))
        assert "--allow-host" in await get.get_error(f"http://localhost:{site.port}/article")
        assert "not on the public internet" in await get.get_error("http://127.0.0.1:9/")
    async with fetching(allow_hosts=["LocalHost"]) as get:
        await get.read(f"http://localhost:{site.port}/article")


async def test_proxies_of_the_environment_are_not_used(site: Site, get: Fetch, monkeypatch: pytest.MonkeyPatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    await get.read(site.url("/article"))
    site.pages["/odd"] = b"no HTTP\r\n\r\n"
    assert "Proxies of the environment are not used" in await get.get_error(site.url("/odd"))


def test_schema_of_fetch_is_short():
    [tool] = [tool for tool in crow_mcp_server.tools() if tool["name"] == "fetch"]
    assert len(json.dumps({key: tool[key] for key in ("name", "description", "inputSchema")})) < 600


def test_http_is_imported_only_with_the_first_fetch():
    heavy = {"httpcore2", "lxml", "trafilatura", "html_to_markdown", "pypdf", "feedparser", "protego", "ddgs"}
    script = "import sys, crow_mcp_server; crow_mcp_server.create_server(); print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not heavy & set(ran.stdout.split())
