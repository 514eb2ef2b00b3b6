"""The chat in Chromium: several devices, the keyboard, hostile texts, a restart."""

from typing import TYPE_CHECKING, Any

import pytest
from crow_core.testing import Reply, ScriptedCall

if TYPE_CHECKING:
    from playwright.async_api import Page

    from conftest import Site

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("database", ["sqlite"], indirect=True)]

NOTE = ScriptedCall(name="notes_note", arguments={"text": "a heron"})
HOSTILE = "</details><script>document.title = 'taken'</script><img src=https://evil.example/x onerror=alert(1)>"


async def say(page: "Page", text: str) -> None:
    await page.locator("#text").fill(text)
    await page.locator("#say .main").click()


async def is_ready(page: "Page") -> None:
    await page.wait_for_selector("body[data-phase=ready]", state="attached")


async def test_two_tabs_and_a_phone_show_one_session_and_the_first_answer_holds(
    start: Any, visit: Any, problems: list[str]
):
    site: Site = await start([Reply("", tool_calls=[NOTE]), Reply("# Done\n\nAll is done.")], mode="ask")
    desk: Page = await visit(site)
    await say(desk, "Plan the garden")
    await desk.wait_for_url("**/chat/*")
    address = desk.url.removeprefix(site.url)
    tab, phone = await visit(site, address), await visit(site, address, device="phone")
    for page in (desk, tab, phone):
        await page.locator(".card").wait_for()
        assert await page.evaluate("document.activeElement.closest('.card')") is None
        assert (await page.title()).startswith("? ")
    await desk.locator("#text").focus()
    await desk.keyboard.press("Enter")  # answers nothing
    await phone.get_by_role("button", name="Yes", exact=True).tap()
    for page in (desk, tab, phone):
        await page.get_by_role("heading", name="Done").wait_for()
        assert await page.locator(".card").count() == 0
    assert await phone.evaluate("document.documentElement.scrollWidth") == 390
    assert problems == []


async def test_nothing_of_hostile_texts_runs_or_loads(start: Any, visit: Any, problems: list[str]):
    call = ScriptedCall(name="notes_note", arguments={"text": HOSTILE})
    replies = [
        Reply(HOSTILE, reasoning=HOSTILE, tool_calls=[call]),
        Reply(f"```{HOSTILE}\n{HOSTILE}\n```\n\n# {HOSTILE}"),
    ]
    site: Site = await start(replies, mode="ask")
    page: Page = await visit(site)
    await say(page, HOSTILE)
    await page.get_by_role("button", name="Yes", exact=True).click()
    await is_ready(page)
    assert await page.locator("#log img, #log script").count() == 0
    assert "evil.example" in await page.locator("#log").inner_text()
    assert await page.title() != "taken"
    await page.reload()
    await page.locator("#log h1").wait_for()
    assert await page.title() != "taken"
    assert problems == []


async def test_keys_complete_send_and_stop(start: Any, visit: Any, problems: list[str]):
    site: Site = await start([Reply("I begin with @heron.txt", hang=True), Reply("Again.")])
    (site.folder / "heron.txt").write_text("")
    page: Page = await visit(site)
    await page.locator("#text").focus()
    await page.keyboard.type("look at @her")
    await page.locator('#menu [data-for$="@her"][aria-selected=true]').wait_for()
    await page.keyboard.press("Enter")
    assert await page.input_value("#text") == "look at @heron.txt"
    await page.keyboard.press("Enter")
    await page.get_by_text("I begin").wait_for()
    await page.keyboard.press("Escape")
    await page.get_by_text("Cancelled.").wait_for()
    await page.keyboard.type("once more")
    await page.keyboard.press("Enter")
    await page.get_by_text("Again.").wait_for()
    assert problems == []


async def test_a_page_says_that_the_server_was_started_again_and_goes_on(start: Any, visit: Any, problems: list[str]):
    site: Site = await start([Reply("I begin with the pond.", hang=True)])
    page: Page = await visit(site)
    await say(page, "Plan the garden")
    await page.get_by_text("the pond").wait_for()
    await page.locator("#text").fill("not sent yet")
    await site.stop()
    await page.get_by_text("The connection is lost").wait_for()
    again: Site = await start([Reply("I go on.")], port=int(site.url.rpartition(":")[2]))
    await visit(again, "/chat")  # as the new address in the same browser
    await page.get_by_text("crow web was started again while crow worked").wait_for()
    await page.get_by_text("the pond").wait_for()
    assert await page.input_value("#text") == "not sent yet"
    await say(page, "Go on")
    await page.get_by_text("I go on.").wait_for()
    assert {text for text in problems if "WebSocket" not in text and "Failed to load" not in text} == set()
