"""`crow batch` as a real process, with a scripted model behind HTTP."""

import asyncio
import json
import os
import signal
from collections import Counter
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from crow_core.testing import Failure, Reply, ScriptedServer

with suppress(ImportError):  # Windows has no pseudo-terminals
    import pty

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

pytestmark = pytest.mark.anyio


def echo(request: dict[str, Any]) -> Reply:
    """Answer with the prompt in capital letters."""
    return Reply(asked(request).upper(), usage={"prompt_tokens": 100, "completion_tokens": 5, "total_tokens": 105})


def asked(request: dict[str, Any]) -> str:
    """Return the prompt of a request."""
    return next(message["content"] for message in request["messages"] if message["role"] == "user")


def write_tasks(machine: "Machine", *tasks: Any) -> Path:
    file = machine.project / "tasks.jsonl"
    file.write_text("".join(f"{task if isinstance(task, str) else json.dumps(task)}\n" for task in tasks))
    return file


def read_results(machine: "Machine") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (machine.project / "out.jsonl").read_text().splitlines()]


BATCH = ("batch", "tasks.jsonl", "--out", "out.jsonl")


async def test_each_task_has_one_result(machine: "Machine") -> None:
    write_tasks(machine, {"id": "a", "prompt": "one"}, '"two"', "", {"prompt": "three", "other": [1]})
    async with ScriptedServer(echo) as server:
        machine.ask(server.url)
        done = await machine.crow(*BATCH)
    assert done.code == 0, done.err
    assert done.out == ""
    assert "3 of 3 tasks succeeded: 315 tokens." in done.err
    results = {result["id"]: result for result in read_results(machine)}
    assert {id: result["text"] for id, result in results.items()} == {"a": "ONE", 2: "TWO", 4: "THREE"}
    assert results["a"]["stop_reason"] == "end_turn"
    assert results["a"]["error"] is None
    assert results["a"]["usage"]["total_tokens"] == 105
    assert len({result["session_id"] for result in results.values()}) == 3


async def test_a_task_that_crow_ended_without_an_answer_has_failed(machine: "Machine") -> None:
    write_tasks(
        machine, {"id": "loop", "prompt": "wait"}, {"id": "typo", "prompt": "/nosuch"}, {"id": "ok", "prompt": "hi"}
    )

    def answer(request: dict[str, Any]) -> Reply:
        look: Any = {"name": "tree", "arguments": {"path": "."}}
        return Reply("", tool_calls=[look]) if asked(request) == "wait" else echo(request)

    async with ScriptedServer(answer) as server:
        machine.ask(server.url)
        done = await machine.crow(*BATCH)
    results = {result["id"]: result for result in read_results(machine)}
    assert done.code == 1, done.err
    assert "1 of 3 tasks succeeded" in done.err
    assert (results["loop"]["stop_reason"], results["loop"]["stopped_by"]) == ("max_turn_requests", "repeated_calls")
    assert "The model called tree 3 times" in results["loop"]["error"]
    assert results["loop"]["text"] == ""
    assert results["typo"]["stopped_by"] == "unknown_command"
    assert results["ok"]["error"] is None


async def test_task_with_a_result_is_not_run_again(machine: "Machine") -> None:
    write_tasks(machine, '"one"')
    async with ScriptedServer(echo) as server:
        machine.ask(server.url)
        await machine.crow(*BATCH)
        write_tasks(machine, '"one"', '"two"')
        done = await machine.crow(*BATCH)
        again = await machine.crow(*BATCH)
        assert [asked(request) for request in server.requests] == ["one", "two"]
    assert (done.code, again.code) == (0, 0)
    assert [result["text"] for result in read_results(machine)] == ["ONE", "TWO"]


async def test_killed_batch_goes_on_with_exactly_one_result_a_task(machine: "Machine") -> None:
    """Kill it several times, each time while tasks run and after some are done."""
    write_tasks(machine, *({"id": n, "prompt": f"task {n}"} for n in range(24)))
    hold, free, numbers = asyncio.Event(), 5, count(1)

    async def answer(request: dict[str, Any]) -> Reply:
        if next(numbers) > free:
            await hold.wait()
        return echo(request)

    async with ScriptedServer(answer) as server:
        machine.ask(server.url)
        for _ in range(3):
            process = await machine.start(*BATCH, "--at-once", "3")
            await server.until(lambda: len(server.requests) >= free + 3)  # noqa: B023, awaited before the loop goes on
            process.send_signal(signal.SIGKILL)
            await process.communicate()
            with (machine.project / "out.jsonl").open("a") as file:
                file.write('{"id":17,"session_id":"tor')
            free = len(server.requests) + 5
        hold.set()
        done = await machine.crow(*BATCH)
        requests = Counter(asked(request) for request in server.requests)
    assert done.code == 0, done.err
    results = read_results(machine)
    assert sorted(result["id"] for result in results) == list(range(24))
    assert all(result["text"] == f"TASK {result['id']}" for result in results)
    assert sum(requests.values()) <= 24 + 3 * 3, "only the tasks that ran at a kill are asked for again"


@pytest.mark.parametrize("cut", ["newline", "half", "start", "zeros"])
async def test_last_line_that_was_not_written_whole_is_repaired(machine: "Machine", cut: str) -> None:
    write_tasks(machine, '"one"', '"two"')
    async with ScriptedServer(echo) as server:
        machine.ask(server.url)
        await machine.crow(*BATCH, "--at-once", "1")
        file = machine.project / "out.jsonl"
        first, second, _ = file.read_bytes().split(b"\n")
        torn = {"newline": second, "half": second[:60], "start": second[:3], "zeros": bytes(40)}[cut]
        file.write_bytes(first + b"\n" + torn)
        done = await machine.crow(*BATCH)
        assert len(server.requests) == (2 if cut == "newline" else 3)
    assert done.code == 0
    assert [result["text"] for result in read_results(machine)] == ["ONE", "TWO"]


@pytest.mark.parametrize(
    "content", ["notes of mine", "a\nb\n", '{"id": 1, "prompt": "x"}', '{"id":1,"prompt":"x"}\n', "[]\n"]
)
async def test_file_that_holds_something_else_stays_as_it_is(machine: "Machine", content: str) -> None:
    write_tasks(machine, '"one"')
    (machine.project / "out.jsonl").write_text(content)
    done = await machine.crow(*BATCH)
    if content == '{"id": 1, "prompt": "x"}' or "notes" in content:
        assert "line 1 is no result of a batch" in done.err
    assert done.code == 2
    assert (machine.project / "out.jsonl").read_text() == content


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (['{"prompt": "a"', '"b"'], "tasks.jsonl: line 1 is no task"),
        (['"a"', "12"], "tasks.jsonl: line 2 is no task"),
        (['{"id": "x"}'], "missing required field `prompt`"),
        (['{"prompt": ["a"]}'], "line 1 is no task"),
        (['" "'], "line 1 has an empty prompt"),
        (['{"id": "a", "prompt": "b"}', '"c"', '{"id": "a", "prompt": "b"}'], "lines 1 and 3 have the same id, a"),
        (['{"id": 2, "prompt": "b"}', '"c"'], "lines 1 and 2 have the same id, 2"),
        ([""], "has no tasks"),
    ],
)
async def test_invalid_tasks_are_one_sentence_before_anything_runs(
    machine: "Machine", lines: list[str], sentence: str
) -> None:
    write_tasks(machine, *lines)
    done = await machine.crow(*BATCH)
    assert done.code == 2
    assert sentence in done.err
    assert done.err.count("\n") == 1
    assert not (machine.project / "out.jsonl").exists()


async def test_changed_task_with_a_result_is_refused(machine: "Machine") -> None:
    write_tasks(machine, '"one"', '"two"')
    async with ScriptedServer(echo) as server:
        machine.ask(server.url)
        await machine.crow(*BATCH)
        write_tasks(machine, '"new"', '"one"', '"two"')
        done = await machine.crow(*BATCH)
        assert len(server.requests) == 2
    assert done.code == 2
    assert "has a result for the task 1 as it was before" in done.err


async def test_second_batch_on_one_file_is_refused(machine: "Machine") -> None:
    write_tasks(machine, '"one"')
    hold = asyncio.Event()

    async def answer(request: dict[str, Any]) -> Reply:
        await hold.wait()
        return echo(request)

    async with ScriptedServer(answer) as server:
        machine.ask(server.url)
        first = await machine.start(*BATCH)
        await server.until(lambda: len(server.requests) == 1)
        second = await machine.crow(*BATCH)
        hold.set()
        done = await machine.finish(first)
        assert len(server.requests) == 1
    assert second.code == 2
    assert "is being written by another crow batch" in second.err
    assert done.code == 0
    assert len(read_results(machine)) == 1


async def test_failed_task_has_its_error_and_runs_again_when_asked(machine: "Machine") -> None:
    write_tasks(machine, '"good"', '"bad"', '"late"')
    works = False

    def answer(request: dict[str, Any]) -> Reply | Failure:
        if not works and asked(request) == "bad":
            return Failure(400, {"error": {"message": "no \x1b[31m bad words"}})
        if not works and asked(request) == "late":
            return Reply("cut", finish_reason="length")
        return echo(request)

    async with ScriptedServer(answer) as server:
        machine.ask(server.url)
        done = await machine.crow(*BATCH)
        results = {result["id"]: result for result in read_results(machine)}
        works = True
        sent = len(server.requests)
        same = await machine.crow(*BATCH)
        assert len(server.requests) == sent, "without --retry-failed, no task runs again"
        again = await machine.crow(*BATCH, "--retry-failed")
        assert sorted(asked(request) for request in server.requests[sent:]) == ["bad", "late"]
    assert (done.code, same.code, again.code) == (1, 1, 0)
    assert "bad words" in results[2]["error"]
    assert "length limit" in results[3]["error"]
    assert results[3]["text"] == "cut"
    assert "1 of 3 tasks succeeded: 2 failed" in done.err
    assert "  2: " in done.err
    assert "--retry-failed" in done.err
    assert "\x1b[31m bad" not in done.err
    texts = sorted((result["id"], result["text"]) for result in read_results(machine))
    assert texts == [(1, "GOOD"), (2, "BAD"), (3, "LATE")]
    assert sorted(path.name for path in machine.project.iterdir()) == ["out.jsonl", "tasks.jsonl"]


async def test_interrupt_says_how_to_go_on(machine: "Machine") -> None:
    write_tasks(machine, '"one"', '"two"', '"three"')
    hold = asyncio.Event()

    async def answer(request: dict[str, Any]) -> Reply:
        if asked(request) != "one":
            await hold.wait()
        return echo(request)

    async with ScriptedServer(answer) as server:
        machine.ask(server.url)
        process = await machine.start(*BATCH, "--at-once", "2")
        await server.until(lambda: len(server.requests) == 3)
        process.send_signal(signal.SIGINT)
        stopped = await machine.finish(process)
        assert [result["text"] for result in read_results(machine)] == ["ONE"]
        hold.set()
        done = await machine.crow(*BATCH)
    assert stopped.code == 130
    assert "Stopped. 2 tasks have no result yet: go on with the same command." in stopped.err
    assert "Traceback" not in stopped.err
    assert done.code == 0
    assert len(read_results(machine)) == 3


async def test_answers_fit_the_schema(machine: "Machine") -> None:
    schema = {"type": "object", "properties": {"size": {"type": "integer"}}, "required": ["size"]}
    (machine.project / "schema.json").write_text(json.dumps(schema))
    write_tasks(machine, '"fits"', '"never"')

    def answer(request: dict[str, Any]) -> Reply:
        return Reply('{"size": 3}' if "fits" in str(asked(request)) else "many")

    async with ScriptedServer(answer) as server:
        machine.ask(server.url)
        done = await machine.crow(*BATCH, "--output-schema", "schema.json")
    assert done.code == 1
    results = {result["id"]: result for result in read_results(machine)}
    assert results[1]["output"] == {"size": 3}
    assert "text" not in results[1]
    assert "did not fit" in results[2]["error"]
    assert "output" not in results[2]


@pytest.mark.parametrize("schema", ["{", "[]", '{"type": 3}', '{"$ref": "https://example.com"}', None])
async def test_unusable_schema_is_one_sentence(machine: "Machine", schema: str | None) -> None:
    write_tasks(machine, '"one"')
    if schema is not None:
        (machine.project / "schema.json").write_text(schema)
    done = await machine.crow(*BATCH, "--output-schema", "schema.json")
    assert done.code == 2
    assert "--output-schema: " in done.err
    assert done.err.count("\n") == 1


async def test_budget_ends_the_batch_and_the_rest_has_no_result(machine: "Machine") -> None:
    write_tasks(machine, *(f'"task {n}"' for n in range(6)))
    async with ScriptedServer(echo) as server:
        machine.ask(server.url)
        done = await machine.crow(*BATCH, "--max-tokens", "210", "--at-once", "1")
        assert len(server.requests) == 2
        same = await machine.crow(*BATCH, "--max-tokens", "210", "--at-once", "1")
        assert len(server.requests) == 2, "what the results took counts"
        more = await machine.crow(*BATCH, "--max-tokens", "10000")
    assert (done.code, same.code, more.code) == (1, 1, 0)
    assert "210 of 210 tokens" in done.err
    assert "4 tasks have no result yet" in done.err
    assert len(read_results(machine)) == 6


async def test_cost_that_is_unknown_cannot_be_limited(machine: "Machine") -> None:
    write_tasks(machine, '"a task"')
    async with ScriptedServer(echo) as server:
        machine.ask(server.url)
        done = await machine.crow(*BATCH, "--max-cost", "1")
        assert not server.requests
    assert (done.code, "--max-cost needs the prices of scripted" in done.err) == (2, True), done.err


async def test_budget_holds_for_tasks_at_once(machine: "Machine") -> None:
    write_tasks(machine, *(f'"task {n}"' for n in range(12)))
    async with ScriptedServer(echo) as server:
        machine.ask(server.url)
        done = await machine.crow(*BATCH, "--max-tokens", "210", "--at-once", "12")
        assert len(server.requests) == 2
    assert done.code == 1


@pytest.mark.slow
async def test_task_that_takes_too_long_has_an_error(machine: "Machine") -> None:
    write_tasks(machine, '"quick"', '"slow"')

    async def answer(request: dict[str, Any]) -> Reply:
        if asked(request) == "slow":
            await asyncio.Event().wait()
        return echo(request)

    async with ScriptedServer(answer) as server:
        machine.ask(server.url)
        done = await machine.crow(*BATCH, "--timeout", "3")
    assert done.code == 1
    assert {result["id"]: result["error"] for result in read_results(machine)} == {
        1: None,
        2: "The prompt was not done within 3 seconds. Give it a longer timeout.",
    }


async def test_task_works_in_its_folder(machine: "Machine") -> None:
    (machine.project / "below").mkdir()
    (machine.project / "below" / "note.txt").write_text("found it")
    write_tasks(machine, {"prompt": "look", "cwd": "below"}, {"prompt": "look", "cwd": "nowhere"})
    call = {"name": "terminal", "arguments": {"command": "cat note.txt"}}

    def answer(request: dict[str, Any]) -> Reply:
        last = request["messages"][-1]
        return Reply(str(last["content"])) if last["role"] == "tool" else Reply(tool_calls=[call])

    async with ScriptedServer(answer) as server:
        machine.ask(server.url)
        done = await machine.crow(*BATCH, "--mode", "yolo")
    results = {result["id"]: result for result in read_results(machine)}
    assert done.code == 1
    assert "found it" in results[1]["text"]
    assert "nowhere" in results[2]["error"]


async def test_missing_model_leaves_no_results(machine: "Machine") -> None:
    write_tasks(machine, '"one"')
    machine.env |= {"OPENAI_API_KEY": "x"}
    done = await machine.crow(*BATCH)
    assert done.code == 2
    assert "no model is named" in done.err
    assert (machine.project / "out.jsonl").read_bytes() == b""


async def test_bar_is_shown_on_a_terminal(machine: "Machine") -> None:
    write_tasks(machine, '"one"', '"two"')
    machine.env["TERM"] = "xterm"
    here, there = pty.openpty()
    async with ScriptedServer(echo) as server:
        machine.ask(server.url)
        process = await asyncio.create_subprocess_exec(
            *("python", "-m", "crow_cli", *BATCH), stderr=there, env=machine.env, cwd=machine.project
        )
        os.close(there)
        shown = b""
        while b"tasks succeeded" not in shown:
            shown += await asyncio.to_thread(os.read, here, 4096)
        assert await process.wait() == 0
    os.close(here)
    assert b"2/2" in shown
