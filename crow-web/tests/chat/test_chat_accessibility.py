"""The chat with all that it can show, in Chromium: axe-core finds nothing serious, and nothing is too wide."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from crow_core.testing import Reply, ScriptedCall
from crow_testing.skipping import unable

if TYPE_CHECKING:
    from playwright.async_api import Browser

    from conftest import Site

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.parametrize("database", ["sqlite"], indirect=True),
]
AXE = Path(__file__).parents[3] / "tests/node/node_modules/axe-core/axe.min.js"
STATES = (("Dig", "completed"), ("Plant", "in_progress"))
STEPS = [{"content": text, "status": status, "priority": "medium"} for text, status in STATES]
PLAN = ScriptedCall(name="plan", arguments={"entries": STEPS})
NOTE = ScriptedCall(name="notes_note", arguments={"text": "a heron"})
TEXT = """# Done

A `word`, **bold**, [a link](https://example.org).

```python
print("frogs")
```

| a | b |
|-|-|
| 1 | 2 |
"""


async def test_all_that_a_chat_shows_is_accessible_light_and_dark_wide_and_narrow(
    start: Any, browser: "Browser", tmp_path: Path
):
    if not AXE.exists():
        unable("axe-core is not installed; `npm ci --prefix tests/node` installs it.")
    first_reply = Reply("I plan.", reasoning="A pond?", tool_calls=[PLAN, NOTE])
    replies = [first_reply, Reply("", tool_calls=[NOTE]), Reply(TEXT)]
    site: Site = await start([*replies, Reply("I go on", hang=True)], mode="ask")
    found: dict[str, str] = {}

    async def check(page: Any, name: str) -> None:
        result = await page.evaluate("axe.run({resultTypes: ['violations']})")
        for each in result["violations"]:
            if each["impact"] in ("serious", "critical"):
                node = each["nodes"][0]
                found[f"{each['id']} {name}"] = f"{node['html'][:160]} {node['failureSummary']}"
        if (wider := await page.evaluate("document.documentElement.scrollWidth - innerWidth")) > 0:
            found[f"width {name}"] = f"{wider} pixels too wide"

    pages: dict[str, Any] = {}
    address = "/chat"
    for scheme in ("light", "dark"):
        for width in (1280, 390):
            context = await browser.new_context(
                bypass_csp=True,  # for axe-core itself
                color_scheme=scheme,  # pyright: ignore[reportArgumentType]
                viewport={"width": width, "height": 900},
            )
            await context.add_init_script(path=AXE)
            page = pages[f"{scheme}-{width}"] = await context.new_page()
            await page.goto(f"{site.url}{address}?token={site.gate.add_token()}")
            if address == "/chat":
                await page.locator("#text").fill("Plan the garden")
                await page.locator("#say .main").click()
                await page.wait_for_url("**/chat/*")
                address = page.url.removeprefix(site.url)
    first = pages["light-1280"]
    await first.get_by_text("Plan: 1 of 2 done").wait_for()

    async def answer() -> None:
        await first.get_by_role("button", name="Yes", exact=True).click()

    for name, page in pages.items():  # two pages and two phones show one session
        await page.locator(".card").wait_for()
        await check(page, f"question {name}")
        await page.screenshot(path=tmp_path / f"question-{name}.png")
    await answer()
    await first.locator(".tool .done").first.wait_for()
    await first.locator(".card").wait_for()
    await answer()
    for name, page in pages.items():
        await page.get_by_role("heading", name="Done").wait_for()
        assert await page.locator("#log .busy").count() == 0
        await page.evaluate("document.querySelectorAll('details').forEach((each) => each.open = true)")
        await page.locator("#text").fill("")
        await page.locator("#text").press_sequentially("/")
        await page.locator("#menu [role=option]").first.wait_for()
        await check(page, f"answer {name}")
        await page.screenshot(path=tmp_path / f"answer-{name}.png", full_page=True)
        await page.locator("#text").fill("")
    await first.get_by_role("button", name="Undo this turn").click()
    await first.get_by_role("heading", name="Undo this turn?").wait_for()
    assert await first.get_by_role("button", name="Keep it").is_visible()
    bottom = await first.get_by_role("button", name="Keep it").evaluate("(it) => it.getBoundingClientRect().bottom")
    assert bottom < await first.locator("#composer").evaluate("(it) => it.getBoundingClientRect().top")
    await check(first, "undo")
    await first.screenshot(path=tmp_path / "undo-light-1280.png")
    await first.get_by_role("button", name="Keep it").click()
    assert found == {}
