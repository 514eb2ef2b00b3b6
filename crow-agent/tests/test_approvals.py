"""What a workflow waits for is shown to a person over ACP, and each answer is in the audit log."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from crow_agent.workflows import (
    Approval,
    WorkflowError,
    answer,
    approve,
    fork,
    list_waiting,
    open_workflows,
    resume,
    workflow,
)
from crow_agent.workflows import answers as showing
from crow_agent.workflows.extension import approvals
from crow_core.acp.schema import RequestPermissionRequest, ToolCall, ToolCallUpdate
from crow_core.app import Crow
from crow_core.testing import ScriptedModel, connect
from crow_mcp_server.terminal.command_watchdog import MARK_VARIABLE
from crow_persistence.audit import list_decisions, verify
from crow_persistence.database import Database

Opened = Callable[..., Any]


@pytest.fixture
def ledger(home: Path) -> Database:
    return Database(f"sqlite:///{home}/crow/crow.db", home / "crow")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(showing, "POLL_INTERVAL", 0.02)


@workflow
async def release(version: str) -> str:
    given = await approve({"release": version})
    return f"{given.approved} {given.note}".strip()


@asynccontextmanager
async def opened(**options: Any) -> AsyncGenerator[None]:
    async with open_workflows([release], **options):
        yield


def read_answers(ledger: Database) -> list[tuple[str, str, str]]:
    with ledger.begin_read() as connection:
        return [(row["call"], row["verdict"], row["by"]) for row in list_decisions(connection)]


@pytest.mark.parametrize(
    ("given", "result", "verdict", "by"),
    [
        (True, "True", "allow", "the program"),
        (Approval(True, "fine"), "True fine", "allow", "the program: fine"),
        ("not on a Friday", "False not on a Friday", "deny", "the program: not on a Friday"),
        (False, "False", "deny", "the program"),
    ],
)
def test_function_of_the_program_answers_what_its_workflows_wait_for(
    ledger: Database, given: Any, result: str, verdict: str, by: str
) -> None:
    questions: list[RequestPermissionRequest] = []

    def ask(question: RequestPermissionRequest) -> Any:
        questions.append(question)
        return given

    async def main() -> None:
        async with opened(ask=ask):
            assert await (await release.start("1.2", id="r")).result() == result

    asyncio.run(main())
    assert [(each.tool_call.title, [one.option_id for one in each.options]) for each in questions] == [
        ('Workflow r asks: {"release": "1.2"}', ["approve", "reject"])
    ]
    ((call, *decided),) = read_answers(ledger)
    assert call.startswith("r/")
    assert decided == [verdict, by]
    assert verify(ledger) == []


def test_question_without_an_answer_leaves_the_workflow_waiting_and_another_process_answers(ledger: Database) -> None:
    asked = asyncio.Event()

    def ask(question: RequestPermissionRequest) -> None:
        asked.set()

    async def main() -> None:
        async with opened(ask=ask):
            handle = await release.start("1.2", id="r")
            await asked.wait()
            await answer("r", True, "fine", by="the user")
            assert await handle.result() == "True fine"

    asyncio.run(main())
    assert [by for _, _, by in read_answers(ledger)] == ["the user: fine"]


def test_client_of_a_session_is_asked_and_asked_again_after_a_restart(ledger: Database) -> None:
    async def main() -> None:
        async with opened():
            await release.start("1.2", id="r")
            async with connect(Crow(ScriptedModel([])).use(approvals), permit=None) as editor:
                await editor.new_session("/")
                await editor.until(lambda _: editor.questions)
                assert editor.of(ToolCall)[-1].raw_input == {
                    "workflow": "r",
                    "step": editor.questions[0].tool_call.tool_call_id.partition("/")[2],
                    "value": {"release": "1.2"},
                }
        async with opened():
            assert len(await list_waiting()) == 1, "a client that has gone has not answered"
            async with connect(Crow(ScriptedModel([])).use(approvals)) as editor:
                await editor.new_session("/")
                assert await release.retrieve("r").result() == "True"
                await editor.until(lambda _: editor.of(ToolCallUpdate))
                assert editor.of(ToolCallUpdate)[-1].status == "completed"

    asyncio.run(main())
    assert [by for _, _, by in read_answers(ledger)] == ["the user, in a client"]


def test_question_that_was_answered_elsewhere_is_withdrawn() -> None:
    async def main() -> None:
        async with opened(), connect(Crow(ScriptedModel([])).use(approvals), permit=None) as editor:
            await editor.new_session("/")
            handle = await release.start("1.2", id="r")
            await editor.until(lambda _: editor.questions)
            await handle.approve(False, "no")
            assert await handle.result() == "False no"
            await editor.until(lambda _: editor.cancelled_questions)
            await editor.until(lambda _: editor.of(ToolCallUpdate))
            assert editor.of(ToolCallUpdate)[-1].status == "failed"

    asyncio.run(main())


def test_answer_that_cannot_be_recorded_is_not_given(home: Path) -> None:
    async def main() -> None:
        async with opened():
            handle = await release.start("1.2", id="r")
            while not await list_waiting():
                await asyncio.sleep(0.02)
            (home / "crow" / "crow.db").mkdir()
            with pytest.raises(WorkflowError, match="could not be stored in the audit log"):
                await handle.approve()
            assert len(await list_waiting()) == 1
            (home / "crow" / "crow.db").rmdir()
            await handle.approve()
            assert await handle.result() == "True"

    asyncio.run(main())


def test_question_is_shown_again_where_its_answer_could_not_be_recorded(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(showing, "ASK_AGAIN", 0.02)

    def ask(question: RequestPermissionRequest) -> bool:
        if caplog.messages:
            (home / "crow" / "crow.db").rmdir()
        return True

    async def main() -> None:
        (home / "crow" / "crow.db").mkdir(parents=True)
        async with opened(ask=ask):
            assert await (await release.start("1.2", id="r")).result() == "True"

    asyncio.run(main())
    assert len(caplog.messages) == 1


def test_one_of_two_answers_at_once_counts_and_the_audit_log_says_which(ledger: Database) -> None:
    async def main() -> tuple[Any, str]:
        async with opened():
            await release.start("1.2", id="r")
            while not await list_waiting():
                await asyncio.sleep(0.02)
        given = (answer("r", True, by="one"), answer("r", False, by="two"))
        ended = await asyncio.gather(*given, return_exceptions=True)
        async with opened():
            return ended, await release.retrieve("r").result()

    ended, result = asyncio.run(main())
    (refused,) = [each for each in ended if each is not None]
    first = ended.index(None)
    name, verdict, words = [("one", "allow", "approved"), ("two", "deny", "rejected")][first]
    assert isinstance(refused, WorkflowError)
    assert f"The answer that counts: {words}, by {name}." in str(refused)
    assert result == str(name == "one")
    assert read_answers(ledger)[0][1] == verdict, "if both were recorded, the newest record says which counts"
    assert verify(ledger) == []


def test_program_that_crow_has_started_answers_nothing(monkeypatch: pytest.MonkeyPatch, ledger: Database) -> None:
    async def main() -> None:
        async with opened():
            handle = await release.start("1.2", id="r")
            while not await list_waiting():
                await asyncio.sleep(0.02)
            monkeypatch.setenv(MARK_VARIABLE, "1")
            for change in (handle.approve(), handle.cancel(), resume("r"), fork("r")):
                with pytest.raises(WorkflowError, match="a model must not"):
                    await change
            monkeypatch.delenv(MARK_VARIABLE)
            await handle.approve()
            assert await handle.result() == "True"

    asyncio.run(main())
    assert len(read_answers(ledger)) == 1
