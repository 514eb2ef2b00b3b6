"""`crow eval` as a real process, with a scripted model behind HTTP."""

import asyncio
import json
import signal
from collections import Counter
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from crow_core.testing import Failure, Reply, ScriptedServer
from crow_testing.databases import unable

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

pytestmark = pytest.mark.anyio
USAGE = {"prompt_tokens": 100, "completion_tokens": 5, "total_tokens": 105, "cached_tokens": 40}
POLITE = "Always say please."


def asked(request: dict[str, Any]) -> str:
    """Return the prompt of a request."""
    return next(message["content"] for message in request["messages"] if message["role"] == "user")


def add(machine: "Machine", name: str, task: str, **files: str) -> Path:
    """Write a task of the dataset `tasks`."""
    folder = machine.project / "tasks" / name
    for path, text in {"task.toml": task, **files}.items():
        (file := folder / path).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def add_words(machine: "Machine", count: int) -> None:
    """Write tasks that ask to say a word."""
    for n in range(count):
        check = f'[[checks]]\nkind = "answer"\ncontains = "WORD {n}"\n'
        add(machine, f"say-{n:02}", f'prompt = "word {n}"\n{check}', **{"solution/answer.txt": f"WORD {n}"})


WORD_CHECK = '[[checks]]\nkind = "answer"\ncontains = "WORD"\n'


def echo(request: dict[str, Any]) -> Reply:
    return Reply(asked(request).upper(), usage=USAGE)


def use(name: str, **arguments: Any) -> Reply:
    return Reply(tool_calls=[{"name": name, "arguments": arguments}], usage=USAGE)


FIX = """
prompt = "Mend add in calc.py."
setup = ["mkdir -p notes", "echo ready > notes/state.txt"]
[limits]
requests = 10
[[checks]]
kind = "command"
run = "python -c 'import calc; assert calc.add(2, 2) == 4'"
[[checks]]
kind = "file"
path = "calc.py"
matches = 'return a \\+ b'
[[checks]]
kind = "python"
function = "checks.py:check"
"""
CHECK = """
def check(workspace, answer):
    assert (workspace / "notes" / "state.txt").read_text() == "ready\\n"
    if "calc.py" not in answer:
        return f"The answer does not name the file: {answer!r}"
"""


def add_fix(machine: "Machine") -> Path:
    files = {"files/calc.py": "def add(a, b):\n    return a - b\n", "checks.py": CHECK}
    solution = {"solution/calc.py": "def add(a, b):\n    return a + b\n", "solution/answer.txt": "I mended calc.py."}
    return add(machine, "fix", FIX, **files, **solution)


def mend(request: dict[str, Any]) -> Reply:
    """Mend the file of the task `fix`, as an agent does."""
    if request["messages"][-1]["role"] == "tool":
        return Reply("I mended calc.py.", usage=USAGE)
    folder = next(line for line in request["messages"][0]["content"].splitlines() if "Working directory" in line)
    path = f"{folder.partition(': ')[2]}/calc.py"
    return use("file_editor", command="str_replace", path=path, old_str="a - b", new_str="a + b")


async def test_agent_that_mends_a_file_passes_in_a_copy_of_it(machine: "Machine") -> None:
    folder = add_fix(machine)
    async with ScriptedServer(mend) as server:
        machine.ask(server.url)
        done = await machine.crow("eval", "tasks", "--json")
        shown = await machine.crow("eval", "show", json.loads(done.out)["id"][:6])
        sessions = await machine.crow("sessions", "show", json.loads(done.out)["cells"][0]["session"])
        stats = await machine.crow("prompts", "stats", "system", "--json")
        table = await machine.crow("prompts", "stats", "system")
    assert done.code == 0, done.err
    (version,) = json.loads(stats.out)
    assert (version["passed"], version["not_passed"], version["pass_rate"]["rate"]) == (1, 0, 1)
    assert "1/1 21%-100%" in table.out
    report = json.loads(done.out)
    (cell,) = report["cells"]
    assert cell["state"] == "passed"
    assert [check["passed"] for check in cell["outcome"]["checks"]] == [True, True, True]
    assert (cell["requests"], cell["input"], cell["output"], cell["cached"]) == (2, 200, 10, 80)
    assert cell["first"] > 0
    assert report["variants"][0]["interval"]["high"] == 1
    assert (folder / "files" / "calc.py").read_text().endswith("a - b\n"), "the task itself is not changed"
    assert "1/1" in shown.out
    assert "100 %" in shown.out
    assert "I mended calc.py." in sessions.out


async def test_failures_are_grouped_by_check_and_by_last_words(machine: "Machine") -> None:
    add_fix(machine)
    add_words(machine, 2)
    async with ScriptedServer(lambda request: Reply("I tried 3 times. I give up!", usage=USAGE)) as server:
        machine.ask(server.url)
        done = await machine.crow("eval", "tasks")
    assert done.code == 0, done.err
    assert "Failures by check" in done.out
    assert "1  command: python -c 'import calc" in done.out
    assert "3  I give up!  (fix, say-00, say-01)" in done.out


async def test_prompts_and_models_are_compared_in_pairs(machine: "Machine") -> None:
    """The scripted model does the work only if the system prompt has a certain sentence."""
    add_words(machine, 12)
    (machine.project / "old.md.j2").write_text("You work in {{ cwd }}.")
    (machine.project / "new.md.j2").write_text("You work in {{ cwd }}. " + POLITE)

    def answer(request: dict[str, Any]) -> Reply:
        return echo(request) if POLITE in request["messages"][0]["content"] else Reply("No.", usage=USAGE)

    async with ScriptedServer(answer) as server:
        machine.ask(server.url)
        prompts = ("--prompt", "old.md.j2", "--prompt", "new.md.j2")
        done = await machine.crow("eval", "tasks", *prompts, "--repeat", "2", "--json", "--html", "report.html")
        assert len(server.requests) == 12 * 2 * 2
    assert done.code == 0, done.err
    report = json.loads(done.out)
    (comparison,) = report["comparisons"]
    pairs = comparison["pairs"]
    assert pairs["difference"] == 1
    assert pairs["interval"]["low"] > 0.5
    assert pairs["p_value"] == 2 / 2**24
    assert {one["label"].split(" ")[0]: one["rate"] for one in report["variants"]} == {"old.md.j2": 0, "new.md.j2": 1}
    assert len({cell["session"] for cell in report["cells"]}) == 48
    page = (machine.project / "report.html").read_text()
    assert all(cell["session"] in page for cell in report["cells"])
    versions = await machine.crow("prompts", "list", "--json")
    assert {one["hash"][:12] for one in json.loads(versions.out) if one["name"] == "system" and one["renders"]} == {
        prompt["version"] for prompt in report["settings"]["prompts"]
    }, "the store has the versions that the sessions were rendered with"


async def test_stored_version_of_a_prompt_is_used_as_it_was(machine: "Machine") -> None:
    add_words(machine, 1)
    (machine.project / "one.md.j2").write_text("The first. " + POLITE)
    async with ScriptedServer(echo) as server:
        machine.ask(server.url)
        await machine.crow("eval", "tasks", "--prompt", "one.md.j2")
        done = await machine.crow("eval", "tasks", "--prompt", "system@1", "--prompt", "current")
        system = [request["messages"][0]["content"] for request in server.requests]
    assert done.code == 0, done.err
    assert sorted(text == f"The first. {POLITE}" for text in system) == [False, True, True]


async def test_killed_evaluation_goes_on_without_repeating_what_has_ended(machine: "Machine") -> None:
    add_words(machine, 12)
    hold, free, numbers = asyncio.Event(), 5, count(1)

    async def answer(request: dict[str, Any]) -> Reply:
        if next(numbers) > free:
            await hold.wait()
        return echo(request)

    async with ScriptedServer(answer) as server:
        machine.ask(server.url)
        process = await machine.start("eval", "tasks", "--at-once", "3")
        await server.until(lambda: len(server.requests) >= free + 3)  # each run is stored before the next begins
        process.send_signal(signal.SIGKILL)
        await process.communicate()
        hold.set()
        (stored,) = json.loads((await machine.crow("eval", "list", "--json")).out)
        assert (stored["passed"], stored["ended"]) == (free, None)
        done = await machine.crow("eval", "--resume", stored["id"], "--json")
        again = await machine.crow("eval", "--resume", stored["id"], "--json")
        requests = Counter(asked(request) for request in server.requests)
    assert (done.code, again.code) == (0, 0), done.err
    report = json.loads(again.out)
    assert report["ended"]
    assert [cell["state"] for cell in report["cells"]] == ["passed"] * 12
    assert len({cell["task"] for cell in report["cells"]}) == 12
    assert sum(requests.values()) == 12 + 3, "only the runs that the kill interrupted are asked for again"


async def test_evaluation_that_runs_is_not_resumed_by_another_process(machine: "Machine") -> None:
    add_words(machine, 2)
    hold = asyncio.Event()

    async def answer(request: dict[str, Any]) -> Reply:
        await hold.wait()
        return echo(request)

    async with ScriptedServer(answer) as server:
        machine.ask(server.url)
        process = await machine.start("eval", "tasks")
        await server.until(lambda: len(server.requests) == 2)
        (stored,) = json.loads((await machine.crow("eval", "list", "--json")).out)
        refused = await machine.crow("eval", "--resume", stored["id"])
        hold.set()
        await process.communicate()
        again = await machine.crow("eval", "--resume", stored["id"])
        assert len(server.requests) == 2, "no run is paid for twice"
    assert refused.code == 2
    assert f"The evaluation {stored['id'][:8]} runs in another process." in refused.err
    assert "Stopped." not in refused.err
    assert (process.returncode, again.code) == (0, 0)


@pytest.mark.parametrize("limit", ["--max-cost", "limits"])
async def test_cost_that_is_unknown_cannot_be_limited(machine: "Machine", limit: str) -> None:
    add(machine, "say", 'prompt = "word"\n' + "[limits]\ncost = 1.0\n" * (limit == "limits") + WORD_CHECK)
    async with ScriptedServer(echo) as server:
        machine.ask(server.url)
        done = await machine.crow("eval", "tasks", *(["--max-cost", "1"] if limit == "--max-cost" else []))
        assert not server.requests
        assert json.loads((await machine.crow("eval", "list", "--json")).out) == [], "none has begun"
    setting = "`cost` in the limits of the task say" if limit == "limits" else "--max-cost"
    assert (done.code, f"{setting} needs the prices of scripted" in done.err) == (2, True), done.err


async def test_cost_of_all_runs_is_limited_over_a_resume(machine: "Machine") -> None:
    add_words(machine, 3)
    async with ScriptedServer(echo) as server:
        prices = "prices = { input = 1000, output = 10000, currency = 'EUR' }"
        machine.configure(f'[models.one]\nbase_url = "{server.url}"\nmodel = "scripted"\n{prices}\n')
        limited = await machine.crow("eval", "tasks", "--at-once", "1", "--max-cost", "0.2", "--json")
        id = json.loads(limited.out)["id"]
        asked_at_first = len(server.requests)
        refused = await machine.crow("eval", "--resume", id, "--max-cost", "0.2")
        assert len(server.requests) == asked_at_first == 2, "what was spent before counts"
        done = await machine.crow("eval", "--resume", id)
        assert len(server.requests) == 3
    assert (limited.code, refused.code, done.code) == (1, 1, 0)
    assert f"1 runs have no outcome: crow eval --resume {id[:8]}" in limited.err
    assert "of 0.2 money" in limited.err
    assert "of 0.2 money" in refused.err


async def test_endpoint_that_is_down_is_an_error_and_no_failure(machine: "Machine") -> None:
    add_words(machine, 3)
    down = True

    def answer(request: dict[str, Any]) -> Reply | Failure:
        return Failure(401, "no") if down and asked(request) == "word 1" else echo(request)

    async with ScriptedServer(answer) as server:
        machine.ask(server.url)
        done = await machine.crow("eval", "tasks", "--json")
        down = False
        report = json.loads(done.out)
        resumed = await machine.crow("eval", "--resume", report["id"], "--json")
        assert len(server.requests) == 4
    assert done.code == 1
    assert "1 runs have no outcome: crow eval --resume" in done.err
    assert Counter(cell["state"] for cell in report["cells"]) == {"passed": 2, "error": 1}
    assert report["variants"][0]["rate"] == 1, "an error counts in no rate"
    assert resumed.code == 0
    assert [cell["state"] for cell in json.loads(resumed.out)["cells"]] == ["passed"] * 3


async def test_limits_of_a_task_fail_its_run(machine: "Machine") -> None:
    limits = {"requests": "requests = 2", "tokens": "tokens = 150", "timeout": "timeout = 0.5"}
    for name, limit in limits.items():
        check = '[[checks]]\nkind = "file"\npath = "never"\nexists = true\n'
        add(machine, name, f'prompt = "{name}"\n[limits]\n{limit}\n{check}', **{"files/a.txt": "a"})

    def answer(request: dict[str, Any]) -> Reply:
        if asked(request) == "timeout":
            return Reply(hang=True)
        return use("glob", pattern=f"*{len(request['messages'])}")

    async with ScriptedServer(answer) as server:
        machine.ask(server.url)
        done = await machine.crow("eval", "tasks", "--json")
        counts = Counter(asked(request) for request in server.requests)
    cells = {cell["task"]: cell for cell in json.loads(done.out)["cells"]}
    assert {name: cell["state"] for name, cell in cells.items()} == dict.fromkeys(limits, "failed")
    reasons = {name: cell["outcome"]["checks"][0]["reason"] for name, cell in cells.items()}
    assert reasons == {
        "requests": "The limit of 2 requests is reached.",
        "tokens": "The limit of 150 tokens is reached.",
        "timeout": "The limit of 0.5 seconds is reached.",
    }
    assert counts["requests"] == counts["tokens"] == 2


async def test_judge_answers_with_its_own_prompt_and_session(machine: "Machine") -> None:
    check = '[[checks]]\nkind = "judge"\nquestion = "Is it kind?"\npass = ">= 6"\n'
    add(machine, "kind", f'prompt = "Be kind."\n{check}', **{"files/a.txt": "a"})
    add(machine, "rude", f'prompt = "Be rude."\n{check}', **{"files/a.txt": "a"})

    def answer(request: dict[str, Any]) -> Reply:
        if "You judge the work" not in request["messages"][0]["content"]:
            return echo(request)
        return Reply(json.dumps({"reason": "So it is.", "score": 7 if "BE KIND" in asked(request) else 2}))

    async with ScriptedServer(answer) as server:
        machine.ask(server.url)
        done = await machine.crow("eval", "tasks", "--json")
        versions = await machine.crow("prompts", "list", "--json")
    assert done.code == 0, done.err
    cells = {cell["task"]: cell for cell in json.loads(done.out)["cells"]}
    assert [cells[name]["state"] for name in ("kind", "rude")] == ["passed", "failed"]
    (verdict,) = cells["rude"]["outcome"]["checks"]
    assert verdict["reason"] == "2: So it is."
    assert verdict["session"] not in ("", cells["rude"]["session"])
    assert {"judge", "system"} <= {one["name"] for one in json.loads(versions.out)}


async def test_typed_result_and_tasks_in_json_lines(machine: "Machine") -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    lines = [
        {"id": "good", "prompt": "one", "checks": [{"kind": "schema", "schema": schema}]},
        {"id": "bad", "prompt": "two", "checks": [{"kind": "schema", "schema": schema}]},
        {
            "prompt": "three",
            "files": {"sub/a.txt": "old"},
            "checks": [{"kind": "file", "path": "sub/a.txt", "equals": "new"}],
        },
    ]
    (machine.project / "tasks.jsonl").write_text("\n".join(map(json.dumps, lines)))

    def answer(request: dict[str, Any]) -> Reply:
        return Reply('{"n": 1}' if asked(request).startswith("one") else '{"n": "x"}')

    async with ScriptedServer(answer) as server:
        machine.ask(server.url)
        done = await machine.crow("eval", "tasks.jsonl", "--json")
    cells = {cell["task"]: cell for cell in json.loads(done.out)["cells"]}
    assert {name: cell["state"] for name, cell in cells.items()} == {"good": "passed", "bad": "failed", "3": "failed"}
    assert "n" in cells["bad"]["outcome"]["checks"][0]["reason"]
    assert "sub/a.txt is not 'new'" in cells["3"]["outcome"]["checks"][0]["reason"]


async def test_task_starts_from_a_commit(machine: "Machine") -> None:
    repository = machine.project / "repository"
    repository.mkdir()
    script = "git init -q; echo one > a; git add a; git -c user.name=a -c user.email=a@b commit -qm one; echo two > a"
    await (await asyncio.create_subprocess_shell(script, cwd=repository, env=machine.env)).wait()
    commands = '[[checks]]\nkind = "command"\nrun = "test $(cat a) = one && ! git remote | grep ."\n'
    add(machine, "git", f'prompt = "Look."\ncommit = "HEAD"\nrepository = "../../repository"\n{commands}')
    async with ScriptedServer(echo) as server:
        machine.ask(server.url)
        done = await machine.crow("eval", "tasks", "--json")
    assert json.loads(done.out)["cells"][0]["state"] == "passed", done.out
    assert "Warning: git: every check passes on the untouched start, so it tells nothing." in done.err


SANDBOXED = """
prompt = "Look."
[[checks]]
kind = "command"
run = "echo new > made; echo evil > $OUTSIDE; test -e made"
sandbox = "workspace"
[[checks]]
kind = "command"
run = "if echo new > more; then exit 1; fi; test -e made"
sandbox = "read-only"
[[checks]]
kind = "python"
function = "checks.py:check"
sandbox = "read-only"
"""


@pytest.mark.posix("there is no sandbox on Windows")
@pytest.mark.parametrize("forbidden", [False, True])
async def test_checks_in_a_sandbox_change_their_workspace_or_nothing(machine: "Machine", forbidden: bool):
    """With namespaces, and with Landlock, where they are forbidden."""
    if forbidden:
        machine.confine()
    programs = json.loads((await machine.crow("status", "--json")).out)["sandbox"]["programs"]
    if programs["level"] == "off":
        unable(programs["says"])
    assert ("Landlock" in programs["says"]) == forbidden
    (outside := machine.project / "outside").write_text("as it was\n")
    script = """
def check(workspace, answer):
    try:
        open(workspace / "new", "w")
    except OSError:
        return True
    return False
"""
    add(machine, "box", SANDBOXED.replace("$OUTSIDE", str(outside)), **{"checks.py": script})
    async with ScriptedServer(echo) as server:
        machine.ask(server.url)
        done = await machine.crow("eval", "tasks", "--json")
    assert json.loads(done.out)["cells"][0]["state"] == "passed", done.out
    assert outside.read_text() == "as it was\n"


@pytest.mark.posix("there is no sandbox on Windows")
async def test_check_whose_sandbox_cannot_be_applied_is_an_error_and_does_not_run(machine: "Machine") -> None:
    machine.confine("--no-landlock")
    outside = machine.project / "outside"
    command = f"kind = 'command'\nrun = 'echo evil > {outside}'\nsandbox = 'workspace'\n"
    add(machine, "box", f'prompt = "Look."\n[[checks]]\n{command}')
    async with ScriptedServer(echo) as server:
        machine.ask(server.url)
        done = await machine.crow("eval", "tasks", "--json")
    assert "Landlock" in done.err
    assert not outside.exists()


async def test_validate_runs_the_checks_on_start_and_solution(machine: "Machine") -> None:
    add_fix(machine)
    add_words(machine, 1)
    good = await machine.crow("eval", "--validate", "tasks")
    assert (good.code, good.out) == (0, "2 of 2 tasks are right.\n"), good.err
    (machine.project / "tasks" / "fix" / "solution" / "run.sh").write_text("rm calc.py")
    always = '[[checks]]\nkind = "file"\npath = "calc.py"\nexists = true\n'
    add(machine, "open", f'prompt = "x"\n{always}', **{"files/calc.py": ""})
    bad = await machine.crow("eval", "--validate", "tasks")
    assert bad.code == 1
    assert "open: file: calc.py exists: passes on the untouched start" in bad.out
    assert "open: there is no reference solution" in bad.out
    assert "fix: command: python -c" in bad.out
    assert "fails on the reference solution: It ended with code 1, not 0" in bad.out
    assert "1 of 3 tasks are right." in bad.out


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        ('prompt = "x"\n[[checks]]\nkind = "comand"\n', "task.toml checks[1].kind: 'comand' is none. Give one of"),
        ('prompt = "x"\n[[checks]]\nkind = "command"\n', "checks[1]: Object missing required field `run`"),
        ('prompt = "x"\n[[checks]]\nkind = "command"\nrun = "x"\nexit = "0"\n', "checks[1].exit: Expected `int`"),
        ('prompt = "x"\n[[checks]]\nkind = "file"\npath = "../x"\nexists = true\n', "leads out of the workspace"),
        ('prompt = "x"\n[[checks]]\nkind = "file"\npath = "x"\n', "checks[1].path: give one of exists, absent"),
        (
            'prompt = "x"\n[[checks]]\nkind = "answer"\nmatches = "("\n',
            "checks[1].matches: it is no regular",
        ),
        ('prompt = "x"\n[[checks]]\nkind = "python"\nfunction = "no.py:f"\n', "there is no file"),
        ('prompt = "x"\n[[checks]]\nkind = "judge"\nquestion = "?"\npass = "maybe"\n', "'maybe' is no rule"),
        ('prompt = "x"\n[[checks]]\nkind = "schema"\nschema = {type = 3}\n', "checks[1].schema:"),
        ('prompt = "x"\nlimit = 3\n[[checks]]\nkind = "answer"\ncontains = "x"\n', "task.toml, line 2, limit:"),
        ('prompt = "x"\n[limits]\nrequests = "a"\n', "limits.requests: expected `int"),
        ('prompt = "x"\n', "checks: there are none"),
        ('[[checks]]\nkind = "answer"\ncontains = "x"\n', "prompt: it is missing or empty"),
        ("prompt =", "is not valid TOML"),
    ],
)
async def test_broken_task_is_named_with_file_and_key_before_anything_runs(
    machine: "Machine", task: str, sentence: str
) -> None:
    add(machine, "broken", task)
    machine.ask("http://127.0.0.1:1/v1")
    done = await machine.crow("eval", "tasks")
    assert done.code == 2
    assert sentence in done.err
    assert "Traceback" not in done.err
    listed = await machine.crow("eval", "list")
    assert (listed.code, listed.out) == (0, "")
    assert "Nothing has been stored yet" in listed.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("nowhere",), "There is no dataset nowhere"),
        (("tasks", "--prompt", "system@9"), "The prompt system has no version 9"),
        (("tasks", "--prompt", "missing.md.j2"), "there is no such file"),
        (("tasks", "--prompt", "undefined.md.j2"), "uses name, which is not defined. Sessions give it cwd, roots"),
        (("tasks", "--prompt", "broken.md.j2"), "the template is wrong"),
        (("tasks", "--resume", "ab"), "give a DATASET, or --resume"),
        (("--resume", "ab"), "There is no evaluation 'ab'"),
        (("show", "ab"), "There is no evaluation 'ab'"),
    ],
)
async def test_what_is_missing_is_one_sentence_before_anything_runs(
    machine: "Machine", arguments: tuple[str, ...], sentence: str
) -> None:
    add_words(machine, 1)
    (machine.project / "undefined.md.j2").write_text("Hello {{ name }}")
    (machine.project / "broken.md.j2").write_text("Hello {{ name")
    async with ScriptedServer(echo) as server:
        machine.ask(server.url)
        await machine.crow("run", "x")
        done = await machine.crow("eval", *arguments)
        assert len(server.requests) == 1
    assert done.code == 2
    assert sentence in done.err
    assert "Traceback" not in done.err


async def test_diff_of_two_evaluations_fails_below_a_limit(machine: "Machine") -> None:
    add_words(machine, 10)
    worse = False

    def answer(request: dict[str, Any]) -> Reply:
        return Reply("No.") if worse and asked(request) in ("word 1", "word 2") else echo(request)

    async with ScriptedServer(answer) as server:
        machine.ask(server.url)
        first = json.loads((await machine.crow("eval", "tasks", "--json")).out)["id"]
        worse = True
        second = json.loads((await machine.crow("eval", "tasks", "--json")).out)["id"]
    fell = await machine.crow("eval", "diff", first, second, "--fail-below", "-0.05")
    assert fell.code == 1
    assert "-20.0 points" in fell.out
    assert "(0 better, 2 worse). No difference is shown" in fell.out
    assert (await machine.crow("eval", "diff", first, second, "--fail-below", "-0.2")).code == 0
    rose = await machine.crow("eval", "diff", second, first, "--json", "--fail-below", "-0.05")
    assert rose.code == 0
    assert json.loads(rose.out)["comparisons"][0]["pairs"]["only_b"] == 2


async def test_task_that_was_changed_is_not_mixed_with_what_has_ended(machine: "Machine") -> None:
    add_words(machine, 2)
    async with ScriptedServer(echo) as server:
        machine.ask(server.url)
        id = json.loads((await machine.crow("eval", "tasks", "--json")).out)["id"]
        task = machine.project / "tasks" / "say-01" / "task.toml"
        task.write_text(task.read_text().replace("WORD", "word"))
        done = await machine.crow("eval", "--resume", id)
        other = json.loads((await machine.crow("eval", "tasks", "--json")).out)["id"]
    assert done.code == 2
    assert "the task say-01 was changed since the evaluation began" in done.err
    assert "these tasks were changed between the two: say-01" in (await machine.crow("eval", "diff", id, other)).err
