"""All pages in Chromium, with a hostile text in every field: models, tools, files, titles, prompts, histories of other
agents, evaluations, workflows and kept answers."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from crow_agent.app import build
from crow_agent.workflows import approve, list_waiting, open_workflows, workflow
from crow_core.testing import Reply, ScriptedCall, ScriptedModel, connect
from crow_eval import evaluation_store
from crow_eval.cells import Candidate, Cell, CellOutcome, EvaluationSettings, SearchNotes, TaskName
from crow_eval.checks import CheckResult
from crow_eval.compared_prompts import PromptVersion
from crow_eval.histories.importing import import_history
from crow_permissions.kept_answers import AnswerRule, KeptAnswer, KeptAnswers
from crow_persistence.database import Database
from crow_persistence.prompt_versions import store_version
from crow_persistence.sql_store import BlockingStore
from crow_testing.skipping import unable

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("database", ["sqlite"], indirect=True)]
AXE = Path(__file__).parents[2] / "tests" / "node" / "node_modules" / "axe-core" / "axe.min.js"
HOSTILE = "</title><script>document.title = 'taken'</script><img src=https://evil.example/x onerror=alert(1)>"
FILE = "<img src=x onerror=alert(1)>.py"
ESCAPES = "\x1b[31mred <b>\x1b[0m \x1b]8;;javascript:alert(1)\x07link\x1b]8;;\x07"


async def fill(database: Database, env: Mapping[str, str], folder: Path) -> list[str]:
    """Fill the database, and return the addresses of all pages."""
    session = await talk(env, folder)
    imported = import_hostile(database, folder)
    search = SearchNotes(
        target=HOSTILE,
        train=[],
        validation=[],
        test=[HOSTILE],
        seed=0,
        max_runs=1,
        candidates=[Candidate(score=0.0), Candidate(parent=0, score=1.0, fault=HOSTILE)],
        winner=1,
        stopped=HOSTILE,
    )
    evaluations = [evaluate(database, session), evaluate(database, session), evaluate(database, session, search)]
    run = await wait_for_approval(env)
    rule = AnswerRule("subcommand", HOSTILE, HOSTILE)
    KeptAnswers(database.folder).add(KeptAnswer(True, rule, "folder", f"/{HOSTILE}"))
    with database.begin_write() as connection:
        store_version(connection, HOSTILE, f"{HOSTILE} {{{{ cwd }}}}", 1)
        store_version(connection, HOSTILE, f"{HOSTILE} changed", 2)
    with database.begin_read() as connection:
        sql = "SELECT calls.id FROM calls JOIN sessions ON number = session WHERE sessions.id = ? ORDER BY started"
        calls = [row[0] for row in connection.exec_driver_sql(sql, (session,))]
    pages = ["/", "/?q=Report", f"/?q={'<script>'}&folder=x&since=y", "/permissions?verify=1", "/charts", "/prompts"]
    pages += ["/evaluations", f"/evaluations/{evaluations[0]}?with={evaluations[1]}", "/workflows", f"/workflows/{run}"]
    pages += [f"/evaluations/{evaluations[2]}"]
    pages += [
        "/prompts/system",
        f"/prompts/{HOSTILE.replace('/', '%2F')}",
        f"/call/{calls[0]}/ask",
        "/charts?by=folder",
    ]
    pages += [f"/session/{id}{more}" for id in (session, *imported) for more in ("", "/calls", "/files", "/dropped")]
    return [*pages, *(f"/call/{call}" for call in calls)]


async def talk(env: Mapping[str, str], folder: Path) -> str:
    """Store a session, and return its id."""
    edit = {"command": "create", "path": str(folder / FILE), "file_text": f"# {HOSTILE}\n"}
    replies = [
        Reply(HOSTILE, tool_calls=[ScriptedCall(name="file_editor", arguments=edit)]),
        Reply("", tool_calls=[ScriptedCall(name="x<script>alert(1)</script>", arguments=HOSTILE)]),
        Reply(f"# {HOSTILE}\n\n![p](https://evil.example/p.png) [l](javascript:alert(1))\n\n```html\n{HOSTILE}\n```\n"),
        Reply("", error=RuntimeError(HOSTILE)),
    ]
    model = ScriptedModel(replies, name=HOSTILE)
    crow = await build(env, models={HOSTILE: model}, mode="yolo")
    async with connect(crow) as editor:
        id = (await editor.new_session(str(folder))).session_id
        await editor.prompt(id, HOSTILE)
        (session,) = crow.sessions.values()
        reply = next(entry for entry in session.log if entry.get("role") == "assistant").get("crow", {}).get("id", "")
        session.log.append({"crow": {"kind": "rating", "reply": reply, "rating": "bad", "why": HOSTILE}})
        session.log.title = HOSTILE
        await session.log.written()
    return id


def import_hostile(database: Database, folder: Path) -> list[str]:
    """Import a history of another agent, and return the ids of its sessions."""
    lines: list[dict[str, Any]] = [
        {"type": "user", "uuid": "1", "parentUuid": None, "message": {"role": "user", "content": HOSTILE}},
        {
            "type": "assistant",
            "uuid": "2",
            "parentUuid": "1",
            "message": {
                "role": "assistant",
                "model": HOSTILE,
                "content": [
                    {"type": "text", "text": HOSTILE},
                    {"type": "tool_use", "id": "t1", "name": "Bash<script>", "input": {"command": HOSTILE}},
                ],
            },
        },
        {
            "type": "user",
            "uuid": "3",
            "parentUuid": "2",
            "message": {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t1", "content": ESCAPES + HOSTILE}],
            },
        },
    ]
    common = {"isSidechain": False, "cwd": f"/{HOSTILE}", "sessionId": "s", "timestamp": "2026-11-23T23:42:09.709Z"}
    history = folder / "history.jsonl"
    history.write_text("\n".join(json.dumps({**line, **common}) for line in lines))
    store = BlockingStore(database.url.render_as_string(hide_password=False), database.folder)
    imported = import_history(store, "claude-code", history)
    store.database.close()
    return imported.sessions


def evaluate(database: Database, session: str, search: SearchNotes | None = None) -> str:
    """Store an evaluation whose run had this session, and return its id."""
    settings = EvaluationSettings(
        tasks=[TaskName(HOSTILE, "d")],
        prompts=[PromptVersion(HOSTILE, "system", "a"), PromptVersion("other", "system", HOSTILE)],
        models=[HOSTILE],
        names=[HOSTILE],
        repeat=1,
        mode="yolo",
        search=search,
    )
    evaluation = evaluation_store.create(database, HOSTILE, settings)
    checks = [CheckResult(name=HOSTILE, kind="answer", passed=False, reason=HOSTILE)]
    outcome = CellOutcome(checks=checks, answer=HOSTILE, denied=[HOSTILE])
    cells = [
        Cell(task=HOSTILE, variant=number, repetition=1, session=session, state=state, outcome=outcome, total=5.0)
        for number, state in enumerate(("failed", "passed"))
    ]
    evaluation_store.store_cells(database, evaluation.number, cells, ended=True)
    return evaluation.id


@workflow(version="1")
async def ask_hostile(text: str) -> str:
    """Ask a person about a text."""
    return (await approve({"text": text})).note


async def wait_for_approval(env: Mapping[str, str]) -> str:
    """Store a run of a workflow that waits for an approval, and return its id."""
    async with open_workflows([ask_hostile], env=env):
        handle = await ask_hostile.start(HOSTILE)
        while not await list_waiting(handle.id, env=env):
            await asyncio.sleep(0.02)
    return handle.id


@pytest.fixture
async def addresses(database: Database, env: dict[str, str], tmp_path: Path) -> list[str]:
    """Fill the database with hostile texts, and return the addresses of all pages."""
    (tmp_path / "work").mkdir()
    return await fill(database, env, tmp_path / "work")


@pytest.mark.slow
async def test_hostile_texts_run_nothing_and_load_nothing_on_any_page(
    page: "Page", addresses: list[str], problems: list[str]
):
    for address in addresses:
        answer = await page.goto(address)
        assert answer
        assert answer.status == 200, address
        assert await page.locator("h1").first.is_visible(), address
        assert await page.title() != "taken", address
        assert await page.evaluate("document.querySelectorAll('script:not([src])').length") == 0, address
        assert problems == [], address


@pytest.mark.slow
async def test_every_page_is_accessible_light_and_dark_wide_and_narrow(
    page: "Page", addresses: list[str], browser: "Browser"
):
    if not AXE.exists():
        unable("axe-core is not installed; `npm ci --prefix tests/node` installs it.")
    state = await page.context.storage_state()
    base = page.url.partition("/?")[0].rstrip("/")
    found: dict[str, Any] = {}
    for scheme in ("light", "dark"):
        for width in (1280, 390):
            context = await browser.new_context(
                base_url=base,
                bypass_csp=True,  # for axe-core itself
                color_scheme=scheme,  # pyright: ignore[reportArgumentType]
                storage_state=state,
                viewport={"width": width, "height": 900},
            )
            await context.add_init_script(path=AXE)
            tab = await context.new_page()
            for address in addresses:
                await tab.goto(address)
                await tab.evaluate("document.querySelectorAll('details').forEach((each) => each.open = true)")
                result = await tab.evaluate("axe.run({resultTypes: ['violations']})")
                bad = [each for each in result["violations"] if each["impact"] in ("serious", "critical")]
                for each in bad:
                    node = each["nodes"][0]
                    found[f"{each['id']} {scheme} {width} {address}"] = f"{node['html'][:160]} {node['failureSummary']}"
                wider = await tab.evaluate("document.documentElement.scrollWidth - innerWidth")
                if wider > 0:
                    found[f"{address} at {width}"] = f"{wider} pixels too wide"
            await context.close()
    assert found == {}


async def test_an_approval_is_given_on_the_page(page: "Page", addresses: list[str], env: dict[str, str]):
    (waiting,) = await list_waiting(env=env)
    await page.goto("/workflows")
    await page.get_by_label("Note").fill("fine")
    await page.get_by_role("button", name="Approve").click()
    await page.wait_for_url(f"**/workflows/{waiting.workflow_id}")
    assert "is answered: approved (fine)" in await page.inner_text("main")
    assert await list_waiting(env=env) == []
