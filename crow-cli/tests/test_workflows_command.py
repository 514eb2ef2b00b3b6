"""`crow workflows` and the arguments of `crow worker`."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from click.testing import CliRunner, Result
from crow_agent.workflows import WorkflowQueue, approve, open_workflows, workflow
from crow_cli import own_tree, worker
from crow_cli.cli import cli
from crow_core.errors import ConfigError
from crow_permissions import running

Crow = Callable[..., Result]


@pytest.fixture
def crow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Crow:
    """Run a command of crow in a home of its own, as a user does who sits at a terminal."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CROW_HOME", str(tmp_path / "crow"))

    def find_no_sign(data: Path) -> str:
        return ""  # the test itself may run below crow

    for module, name in (
        (own_tree, "find_sign_of_crow"),
        (own_tree, "find_unknown_origin"),
        (running, "find_sign_of_crow"),
    ):
        monkeypatch.setattr(module, name, find_no_sign)

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(cli, arguments)

    return run


@asynccontextmanager
async def waiting_run(id: str) -> AsyncGenerator[Any]:
    """Start a run that waits for an approval."""

    @workflow(name="waiting", version="2")
    async def wait(question: str) -> str:
        answer = await approve(question)
        return f"{'yes' if answer else 'no'} {answer.note}".strip()

    async with open_workflows([wait]):
        yield await wait.start("Go on?", id=id)


async def until_waiting(crow: Crow) -> None:
    while "waits for approval" not in (await asyncio.to_thread(crow, "workflows", "list")).output:
        await asyncio.sleep(0.05)


def test_user_sees_what_waits_and_answers_it(crow: Crow) -> None:
    async def main() -> None:
        async with waiting_run("w1") as handle:
            await until_waiting(crow)
            shown = await asyncio.to_thread(crow, "workflows", "show", "w1")
            assert "waiting (version 2)" in shown.output
            assert shown.output.endswith("waits for an approval at step 1:\nGo on?\n")
            approved = await asyncio.to_thread(crow, "workflows", "approve", "w1", "--note", "fine")
            assert approved.exit_code == 0, approved.output
            assert await handle.result() == "yes fine"

    asyncio.run(main())
    (row,) = json.loads(crow("workflows", "list", "--json").output)
    assert (row["id"], row["state"], row["waiting"]) == ("w1", "done", False)
    nothing = crow("workflows", "approve", "w1")
    assert nothing.exit_code == 2
    assert "Workflow w1 waits for no approval." in nothing.output


def test_first_answer_stands_and_the_second_says_so_while_no_worker_runs(crow: Crow) -> None:
    async def main() -> None:
        async with waiting_run("w5"):
            await until_waiting(crow)

    asyncio.run(main())
    assert crow("workflows", "approve", "w5", "--note", "fine").exit_code == 0
    second = crow("workflows", "approve", "w5", "--reject")
    assert second.exit_code == 2
    assert "The answer that counts: approved, by the user, by command (fine)." in second.output
    (row,) = json.loads(crow("workflows", "list", "--json").output)
    assert (row["waiting"], row["answered"]) == (False, True)
    assert "answered, waits for a worker with version 2" in crow("workflows", "list").output
    shown = crow("workflows", "show", "w5").output
    assert "step 1 is answered: approved (fine).\nIt goes on when a worker runs waiting in version 2." in shown
    audited = json.loads(crow("audit", "list", "--json").output)
    assert [each["verdict"] for each in audited if each["tool"] == "approve"] == ["allow"]

    async def finish() -> str:
        async with waiting_run("w5") as handle:
            return await handle.result()

    assert asyncio.run(finish()) == "yes fine"
    late = crow("workflows", "approve", "w5", "--reject")
    assert (late.exit_code, "The answer that counts: approved, by the user" in late.output) == (2, True)


def test_steps_are_listed_with_the_numbers_that_fork_takes(crow: Crow) -> None:
    async def main() -> None:
        async with waiting_run("w6") as handle:
            await until_waiting(crow)
            asked = json.loads((await asyncio.to_thread(crow, "workflows", "show", "w6", "--json")).output)
            (step,) = asked["steps"]
            assert (step["number"], step["name"], step["state"]) == (1, "approve", "waiting")
            assert asked["waiting"][0]["label"] == step["label"] == "1"
            await handle.approve(True, "fine")
            await handle.result()
            shown = (await asyncio.to_thread(crow, "workflows", "show", "w6")).output
            assert 'result     "yes fine"' in shown
            assert "approve  done   {" in shown
            for after in ("2", "3", "6", None):  # whatever follows the step of the approval keeps its answer
                forked = ["--step", after] if after else []
                id = f"kept-{after}"
                await asyncio.to_thread(crow, "workflows", "fork", "w6", "--id", id, *forked)
                assert await type(handle)(id, handle._url).result() == "yes fine"
            for unknown in ("99", "7", "0", "-3"):
                refused = await asyncio.to_thread(crow, "workflows", "fork", "w6", "--step", unknown)
                assert refused.exit_code == 2
                assert f"Workflow w6 has no step {unknown}: its last is 1. `crow workflows show w6`" in refused.output
            await asyncio.to_thread(crow, "workflows", "fork", "w6", "--id", "again", "--step", str(step["number"]))
            await until_waiting(crow)
            assert (await asyncio.to_thread(crow, "workflows", "fork", "again", "--step", "6")).exit_code == 2

    asyncio.run(main())


def test_user_cancels_resumes_and_forks(crow: Crow) -> None:
    async def main() -> None:
        async with waiting_run("w2"):
            await until_waiting(crow)

    asyncio.run(main())
    assert crow("workflows", "cancel", "w2").exit_code == 0
    (row,) = json.loads(crow("workflows", "list", "--json", "--state", "cancelled").output)
    assert row["id"] == "w2"
    assert "Workflow w2 is cancelled: there is nothing to cancel." in crow("workflows", "cancel", "w2").output
    assert crow("workflows", "resume", "w2").exit_code == 0
    forked = crow("workflows", "fork", "w2", "--id", "w3")
    assert (forked.exit_code, forked.output) == (0, "w3\n")
    assert {row["id"] for row in json.loads(crow("workflows", "list", "--json").output)} == {"w2", "w3"}


@pytest.mark.parametrize("command", ["approve", "cancel", "resume", "fork"])
def test_below_crow_nothing_is_approved_or_changed(crow: Crow, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_sign(data: Path) -> str:
        return "it runs below process 1"

    monkeypatch.setattr(own_tree, "find_sign_of_crow", find_sign)
    refused = crow("workflows", command, "w1")
    assert refused.exit_code == 2
    assert "it does not run where crow has started it: it runs below process" in refused.output


def test_unknown_workflow_is_one_sentence(crow: Crow) -> None:

    async def main() -> None:
        async with waiting_run("w4"):
            pass

    asyncio.run(main())
    for command in ("show", "approve", "cancel", "resume", "fork"):
        answered = crow("workflows", command, "nope")
        assert (answered.exit_code, answered.output.count("\n")) == (2, 1), answered.output
        assert "nope" in answered.output


def test_worker_says_what_is_wrong_with_its_program(crow: Crow, tmp_path: Path) -> None:
    for name, code, expected in (
        ("broken_program", "1 / 0", "cannot be imported: ZeroDivisionError: division by zero."),
        ("exiting_program", "raise SystemExit", "cannot be imported: it ends the process."),
    ):
        (tmp_path / f"{name}.py").write_text(code)
        answered = crow("worker", str(tmp_path / f"{name}.py"))
        assert (answered.exit_code, expected in answered.output) == (2, True), answered.output
    assert "no_such_module cannot be imported" in crow("worker", "no_such_module").output


def test_worker_chooses_queues_and_their_limits() -> None:
    @workflow(queue="a")
    async def first() -> None: ...

    @workflow(queue=WorkflowQueue("b", rate=(1, 60)))
    async def second() -> None: ...

    both = [first, second]
    assert worker.choose_queues(both, [], None) == [WorkflowQueue("a"), WorkflowQueue("b", rate=(1, 60))]
    assert worker.choose_queues(both, ["b"], 3) == [WorkflowQueue("b", concurrency=3, rate=(1, 60))]
    with pytest.raises(ConfigError, match=r"no workflow uses the queue 'c'. They use a, b\."):
        worker.choose_queues(both, ["c"], None)


class FakeEngine:
    """An engine as the health of a worker sees it."""

    executor, running, is_alive = "e", 1, True


def test_health_is_an_answer_or_a_file(tmp_path: Path) -> None:
    engine: Any = FakeEngine()
    with worker.report_health(str(tmp_path / "health"), engine) as state:
        state.look()
        assert json.loads((tmp_path / "health").read_text())["healthy"]
    assert not (tmp_path / "health").exists()
    with worker.listen_for_health(0, state) as port:
        with urlopen(f"http://127.0.0.1:{port}") as answered:
            assert json.load(answered) == {"healthy": True, "executor": "e", "running": 1}
        engine.is_alive = False
        with pytest.raises(HTTPError) as refused:
            urlopen(f"http://127.0.0.1:{port}")
        assert refused.value.code == 503
        refused.value.close()


def test_help_loads_no_engine() -> None:
    program = "import sys; from crow_cli.cli import cli; print([n for n in ('dbos', 'crow_agent') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "dbos" not in done.stdout
