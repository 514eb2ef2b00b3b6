"""The pages in Chromium: the keyboard alone, forms, and the way of a newcomer."""

from typing import TYPE_CHECKING

import pytest
from crow_core import Crow
from crow_core.mcp.server import Server
from crow_core.testing import Reply, ScriptedCall, ScriptedModel, connect
from crow_permissions.extension import permissions
from crow_permissions.kept_answers import AnswerRule, KeptAnswer, KeptAnswers
from crow_persistence.database import Database
from crow_persistence.extension import persistence
from fastmcp import FastMCP

if TYPE_CHECKING:
    from playwright.async_api import Page

    from conftest import Site

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("database", ["sqlite"], indirect=True)]
FOCUSABLE = "a[href], button, input:not([type=hidden]), select, summary, textarea, [tabindex='0']"
LIST = """(selector) => [...document.querySelectorAll(selector)]
  .filter((each) => each.checkVisibility({visibilityProperty: true}) && !each.closest("datalist"))
  .map((each, number) => { each.dataset.number = number; return number; })"""


async def test_the_keyboard_alone_reaches_everything(page: "Page", site: "Site"):
    for address in ("/", f"/session/{site.sessions[0]}", "/permissions", "/charts"):
        await page.goto(address)
        wanted = set(await page.evaluate(LIST, FOCUSABLE))
        reached: set[int] = set()
        for _ in range(len(wanted) * 2 + 10):  # a date has several stops
            await page.keyboard.press("Tab")
            number = await page.evaluate("document.activeElement?.dataset.number")
            reached |= {int(number)} if number else set()
        assert wanted - reached == set(), address


async def test_a_phone_shows_each_page_without_scrolling_sideways(page: "Page", site: "Site"):
    await page.set_viewport_size({"width": 390, "height": 844})
    session = f"/session/{site.sessions[0]}"
    for address in ("/", session, f"{session}/calls", f"{session}/files", "/permissions", "/charts", "/prompts"):
        await page.goto(address)
        wide = "(all) => all.filter((each) => each.scrollWidth > each.clientWidth + 1).map((each) => each.outerHTML)"
        assert await page.eval_on_selector_all("html, .scroll", wide) == [], address


async def test_keys_go_to_the_search_and_from_prompt_to_prompt(page: "Page", site: "Site"):
    await page.keyboard.press("/")
    await page.keyboard.type("heron")
    await page.keyboard.press("Enter")
    await page.wait_for_url("**/?q=heron*")
    await page.set_viewport_size({"width": 1280, "height": 200})
    await page.goto(f"/session/{site.sessions[0]}")
    prompts: list[str] = await page.evaluate("[...document.querySelectorAll('article.user')].map((each) => each.id)")
    assert len(prompts) == 2
    for key, at in (("j", 0), ("j", 1), ("k", 0)):
        await page.keyboard.press(key)
        assert await page.evaluate("document.activeElement.id") == prompts[at]


async def test_a_newcomer_finds_the_cost_the_rule_and_the_request_in_three_clicks(page: "Page", site: "Site"):
    assert await page.locator(".day .end").first.is_visible(), "the cost and the time of each session, by day"
    await page.get_by_role("link", name="Permissions", exact=True).click()
    await page.wait_for_url("**/permissions")
    assert "by the mode yolo" in (ledger := await page.inner_text("main")) or "by mode yolo" in ledger
    await page.locator(".rows .end a").first.click()
    await page.wait_for_url(f"**/session/{site.sessions[0]}?at=*#*")
    await page.locator(".usage a[href^='/call/']").first.click()
    await page.wait_for_url("**/call/**")
    assert "byte for byte" in await page.inner_text("main")


async def test_a_kept_answer_is_revoked_on_the_page(page: "Page", database: Database):
    kept = KeptAnswers(database.folder)
    for command in ("git log", "git push"):
        kept.add(KeptAnswer(True, AnswerRule("subcommand", "terminal", command), "always"))
    await page.goto("/permissions")
    async with page.expect_navigation():  # the address stays the same
        await page.locator("form.row", has_text="git push").get_by_role("button", name="Revoke").click()
    assert "git push" not in await page.inner_text("main")
    assert [answer.rule.value for answer in KeptAnswers(database.folder).list_all()] == ["git log"]


async def test_the_output_of_a_program_has_its_colours_and_no_other_codes(page: "Page", database: Database):
    tools = FastMCP("tests")

    @tools.tool
    def run() -> str:
        """Run the tests."""
        link = "\x1b]8;;javascript:alert(1)\x07link\x1b]8;;\x07"
        return f"\x1b[1;31mfailed\x1b[0m\n\x1b[32mpassed\x1b[0m {link}\x1b[2J\x1b[9C."

    url = database.url.render_as_string(hide_password=False)
    replies = [Reply("", tool_calls=[ScriptedCall(name="tests_run", arguments={})]), Reply("Done.")]
    crow = Crow(ScriptedModel(replies), servers=[Server("tests", lambda: tools, shared=True)])
    crow.use(persistence, url=url, folder=database.folder).use(permissions, mode="yolo")
    async with connect(crow) as editor:
        session = await editor.new_session("/tmp")
        await editor.prompt(session.session_id, "Test it")
    await page.goto(f"/session/{session.session_id}")
    await page.evaluate("document.querySelectorAll('details').forEach((each) => each.open = true)")
    output = page.locator("pre", has_text="passed")
    colour = "(it) => getComputedStyle(it).color"
    plain = await output.evaluate(colour)
    red = await output.locator("span", has_text="failed").evaluate(colour)
    green = await output.locator("span", has_text="passed").evaluate(colour)
    assert len({plain, red, green}) == 3
    shown = await output.inner_text()
    assert shown.split() == ["failed", "passed", "link."]
    assert await output.locator("a").count() == 0
