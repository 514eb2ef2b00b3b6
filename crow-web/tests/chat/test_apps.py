"""MCP Apps: the HTML of a server in its sandbox, and what it may say."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from crow_core.testing import Reply, ScriptedCall

if TYPE_CHECKING:
    from playwright.async_api import Page, Route

    from conftest import Site

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("database", ["sqlite"], indirect=True)]

CALL = ScriptedCall(name="notes_show", arguments={"bird": "</script>heron"})
APPS = Path(__file__).parent / "apps"


async def open_app(start: Any, visit: Any, name: str, *more: Reply) -> "tuple[Site, Page]":
    sites: list[Site] = []
    html = (APPS / f"{name}.html").read_text()
    replies = [Reply("", tool_calls=[CALL]), Reply("Done."), *more]

    def read() -> str:
        return html.replace("PAGE", sites[0].url).replace("WS", sites[0].url.replace("http", "ws"))

    sites.append(site := await start(replies, app=read))
    page: Page = await visit(site)
    return site, page


async def say(page: "Page", text: str) -> None:
    await page.locator("#text").fill(text)
    await page.locator("#say .main").click()


async def test_an_app_gets_its_call_and_speaks_with_the_persons_consent_alone(
    start: Any, visit: Any, problems: list[str]
):
    site, page = await open_app(start, visit, "good", Reply("You are welcome."))
    await say(page, "Show a bird")
    app = page.frame_locator(".app iframe").frame_locator("iframe")
    await app.get_by_text("crow shows a picture of a </script>heron for </script>heron").wait_for()
    await page.locator(".app iframe[style='height: 345px;']").wait_for()
    await page.locator(".app .card pre", has_text="Delete all").wait_for()
    bottom = await page.locator(".app .card").evaluate("(it) => it.getBoundingClientRect().bottom")
    assert bottom < await page.locator("#composer").evaluate("(it) => it.getBoundingClientRect().top"), "it is in view"
    await page.get_by_role("button", name="Refuse").click()
    await app.get_by_text("Delete all: Message sending denied").wait_for()
    await page.locator(".app .card pre", has_text="Thank you").wait_for()
    await page.get_by_role("button", name="Say it").click()
    await page.get_by_text("You are welcome.").wait_for()
    requests = site.crow.models["scripted"].requests
    assert "Thank you" in str(requests[-1]["messages"])
    assert "Delete all" not in str(requests[-1]["messages"])
    assert "notes_refresh" not in str(requests[0]["tools"]), "a tool for apps alone is hidden from the model"
    assert "notes_show" in str(requests[0]["tools"])
    assert problems == []


async def test_a_hostile_app_reaches_nothing(start: Any, visit: Any, problems: list[str]):
    reached: list[str] = []

    async def note(route: "Route") -> None:
        reached.append(route.request.url)
        await route.fulfill(body="evil", headers={"access-control-allow-origin": "*"})

    site, page = await open_app(start, visit, "hostile")
    await page.context.route("https://evil.example/**", note)
    await say(page, "Show a bird")
    app = page.frame_locator(".app iframe").frame_locator("iframe")
    await app.get_by_text("END").wait_for()
    written = (await app.locator("body").inner_text()).splitlines()
    refused = [
        "parent",
        "top",
        "cookie",
        "storage",
        "fetch",
        "no-cors",
        "page",
        "frames",
        "socket",
        "popup",
        "worker",
        "navigate",
    ]
    assert [f"{name}: refused" for name in refused if f"{name}: refused" not in written] == []
    for method in ("tools/call", "resources/read", "ui/open-link", "constructor", "__proto__"):
        assert f"{method}: crow does not let apps use {method}" in written
    assert "role: Invalid message format" in written
    await page.get_by_text("Done.").wait_for()
    await app.get_by_role("button", name="Leave").click()
    await app.get_by_text("END").wait_for(state="detached")
    assert page.url.startswith(f"{site.url}/chat/")
    assert await page.locator(".app .card").count() == 0, "a message around the bridge is not heard"
    assert reached == []
    assert not [each for each in page.frames if "evil" in each.url and each.url != "chrome-error://chromewebdata/"]


async def test_the_frames_answer_only_what_they_know(start: Any):
    site: Site = await start([])
    csp = {"connectDomains": ["https://api.example.org", "https://x;script-src *", "http://plain.example"]}
    address = site.frames.add("<p>app</p>", csp)
    async with httpx2.AsyncClient() as client:
        outer = await client.get(address)
        inner = await client.get(address.replace("/frame/", "/app/"))
        assert re.search(r"frame-ancestors http://127.0.0.1:\d+ ", outer.headers["content-security-policy"])
        policy = inner.headers["content-security-policy"]
        assert policy.startswith("sandbox allow-scripts; default-src 'none';")
        assert "connect-src https://api.example.org;" in policy
        assert "plain.example" not in policy
        assert "script-src *" not in policy
        assert (await client.get(f"{site.frames.origin}/app/x")).status_code == 404
        assert (await client.post(address)).status_code == 404
        other = await client.get(address, headers={"host": "evil.example"})
        assert other.status_code == 404
