"""Completions in a page: the last request holds, and no server keeps the others waiting."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest
from crow_core.acp.complete_method import Completion
from crow_core.app import Crow
from crow_core.session.session import Command, Session
from crow_core.testing import Reply

if TYPE_CHECKING:
    from playwright.async_api import Page, WebSocketRoute

    from conftest import Site, Tab

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("database", ["sqlite"], indirect=True)]


class Birds:
    """A command that completes names of birds. An answer for `wait` comes when it may."""

    def __init__(self) -> None:
        self.may_answer, self.is_asked = asyncio.Event(), asyncio.Event()

    def __call__(self, crow: Crow) -> None:
        @crow.commands
        def list_commands(session: Session) -> list[Command]:
            return [Command("bird", "A bird", self.run, "name", self.complete)]

    async def complete(self, session: Session, typed: str) -> Sequence[Completion]:
        if typed.endswith("wait"):
            self.is_asked.set()
            await self.may_answer.wait()
        return [Completion(f"{typed}-{n}", len(typed)) for n in range(3)]

    async def run(self, session: Session, words: str) -> str:
        return words


def shows(text: str) -> Callable[["Tab"], bool]:
    return lambda tab: f'data-for="{text}"' in tab.values.get("@menu", "")


async def test_the_answer_to_an_earlier_request_never_replaces_that_to_a_later_one(start: Any):
    birds = Birds()
    site: Site = await start([Reply("Hello.")], extensions=[birds])
    async with site.open() as tab:
        await tab.say("hello")
        await tab.is_ready()
        await tab.act("complete", text="/bird wait")
        await birds.is_asked.wait()
        await tab.act("complete", text="/bird waits")
        await tab.until(shows("/bird waits"))
        birds.may_answer.set()
        await tab.act("option", option="", value="plan")  # the agent answers it after the earlier request
        await tab.until(lambda tab: 'value="plan" selected' in tab.blocks["options"])
        assert 'data-for="/bird wait"' not in str(tab.received)


async def test_files_are_offered_while_the_agent_still_looks_and_what_was_chosen_stays_chosen(start: Any, visit: Any):
    birds = Birds()
    site: Site = await start([], extensions=[birds])
    for name in ("wait.txt", "wait-more.txt"):
        (site.folder / name).write_text("")
    page: Page = await visit(site)
    await page.locator("#text").focus()
    await page.wait_for_selector("body[data-phase=ready]", state="attached")
    await page.keyboard.type("/bird @wait")
    await page.locator('#menu [data-for$="@wait"]').nth(1).wait_for()
    await birds.is_asked.wait()
    await page.keyboard.press("ArrowDown")
    birds.may_answer.set()
    await page.locator("#menu [data-insert='@wait-2']").wait_for()
    assert await page.locator("#menu [aria-selected=true]").inner_text() == "@wait-more.txt"


async def test_a_command_is_offered_though_it_was_typed_before_the_page_was_connected(
    start: Any, visit: Any, problems: list[str]
):
    site: Site = await start([], extensions=[Birds()])
    may_connect = asyncio.Event()

    async def hold(route: "WebSocketRoute") -> None:
        await may_connect.wait()
        route.connect_to_server()

    first: Page = await visit(site)
    await first.context.route_web_socket("**/live*", hold)
    page: Page = await visit(site)
    await page.locator("#text").focus()
    await page.keyboard.type("/bir")
    may_connect.set()
    await page.locator('#menu [data-for="/bir"]').wait_for()
    assert problems == []


async def test_a_menu_comes_though_the_connection_was_lost_before_the_answer(start: Any, visit: Any):
    birds = Birds()
    site: Site = await start([], extensions=[birds])
    page: Page = await visit(site)
    await page.locator("#text").focus()
    await page.wait_for_selector("body[data-phase=ready]", state="attached")
    await page.keyboard.type("/bird wait")
    await birds.is_asked.wait()
    await page.evaluate("socket.close()")
    birds.may_answer.set()
    await page.locator('#menu [data-for="/bird wait"]').first.wait_for()
