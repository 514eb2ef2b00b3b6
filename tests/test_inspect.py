"""crow as an agent of the real `inspect eval`, with a scripted endpoint; `crow eval import` of its logs."""

import asyncio
import json
import os
import sqlite3
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from crow_cli.cli import cli
from crow_core.testing import Failure, Reply, ScriptedServer

TASKS = Path(__file__).parent / "python" / "inspect_tasks.py"
MEND = {"command": "str_replace", "path": "calc.py", "old_str": "a - b", "new_str": "a + b"}


def answer(request: dict[str, Any]) -> Reply | Failure:
    """Answer for the model, by the first words of the user and the number of replies so far."""
    said = json.dumps(next(message for message in request["messages"] if message["role"] == "user"))
    replies = sum(message["role"] == "assistant" for message in request["messages"])
    if "Mend add." in said:
        calls: Any = [
            {"name": "file_editor", "arguments": MEND},
            {"name": "terminal", "arguments": {"command": "touch x"}},
        ]
        return Reply("Mended.") if replies else Reply(tool_calls=calls)
    if "Look around." in said:
        return Reply(tool_calls=[{"name": "tree", "arguments": {"depth": 1 + replies}}])
    if "Wait." in said:
        return Reply(hang=True)
    if "Fail." in said:
        return Failure(400, {"error": {"message": "There is no such model."}})
    return Reply("Un oiseau.", reasoning="Is it a bird?")


@dataclass(frozen=True)
class Evaluated:
    """The results of a run of `inspect eval`: its output, its logs, and the requests that it made."""

    output: str
    logs: dict[str, Any]
    """The logs by the names of their tasks."""
    requests: list[dict[str, Any]]
    """The bodies of the requests to the endpoint."""
    database: Path
    paths: list[Path]
    """The files of the logs."""

    def path_of(self, task: str) -> Path:
        return next(path for path in self.paths if f"_{task}_" in path.name)

    def read(self, statement: str, *values: Any) -> list[Any]:
        """Read from crow's database."""
        with closing(sqlite3.connect(self.database)) as connection:
            return connection.execute(statement, values).fetchall()

    def find_sample(self, task: str) -> dict[str, Any]:
        return self.logs[task]["samples"][0]


@pytest.fixture(scope="module")
def evaluated(inspect: None, tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    """Run all tasks with crow, in one process, as importing Inspect takes seconds."""
    folder = tmp_path_factory.mktemp("inspect")

    async def run() -> tuple[str, list[dict[str, Any]]]:
        async with ScriptedServer(answer) as server:
            model = {"SCRIPTED_BASE_URL": server.url, "SCRIPTED_API_KEY": "key"}
            env = {"PATH": os.environ["PATH"], "HOME": str(folder), "CROW_HOME": str(folder / "crow"), **model}
            command = ["eval", TASKS.name, "--solver", "crow_eval/crow", "--model", "openai-api/scripted/scripted"]
            options = ["--log-dir", str(folder / "logs"), "--log-format", "json", "--display", "plain", "--no-ansi"]
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "inspect_ai", *command, *options),
                cwd=TASKS.parent,
                env=env,
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
            )
            output, _ = await process.communicate()
            return output.decode(), server.requests

    output, requests = asyncio.run(run())
    paths = sorted((folder / "logs").glob("*.json"))
    logs = {log["eval"]["task"]: log for log in (json.loads(path.read_text("utf-8")) for path in paths)}
    assert len(logs) == 7, output
    return Evaluated(output, logs, requests, folder / "crow" / "crow.db", paths)


def test_crow_solves_a_sample_of_inspect_in_its_sandbox_with_the_model_of_the_task(evaluated: Evaluated):
    log, sample = evaluated.logs["mend"], evaluated.find_sample("mend")
    assert log["status"] == "success"
    assert sample["scores"]["adds"]["value"] == "C"
    assert sample["output"]["choices"][0]["message"]["content"] == "Mended."
    assert [message["role"] for message in sample["messages"]] == [
        "system",
        "user",
        *["assistant", "tool"],
        "tool",
        "assistant",
    ]
    notes = sample["store"]["crow"]
    assert notes["stop_reason"] == "end_turn"
    assert len(notes["denied"]) == 1  # the command, as nobody can be asked
    calls = evaluated.read(
        "SELECT calls.model, input, output FROM calls JOIN sessions ON sessions.number = calls.session "
        "WHERE sessions.id = ?",
        notes["session"],
    )
    used = sample["model_usage"]["openai-api/scripted/scripted"]
    assert [model for model, _, _ in calls] == ["openai-api/scripted/scripted"] * 2
    assert sum(tokens for _, tokens, _ in calls) == used["input_tokens"]
    assert sum(tokens for _, _, tokens in calls) == used["output_tokens"]


def test_the_system_messages_of_a_sample_end_crows_system_prompt(evaluated: Evaluated):
    sample = evaluated.find_sample("question")
    assert sample["scores"]["includes"]["value"] == "C"
    system = sample["messages"][0]
    assert (system["role"], system["content"].splitlines()[-1]) == ("system", "Answer in French.")
    assert sample["messages"][1]["content"] == "What is a crow?"


def test_a_limit_of_inspect_ends_the_turn_and_the_sample_is_scored(evaluated: Evaluated):
    for task in ("tokens", "time"):
        sample = evaluated.find_sample(task)
        assert evaluated.logs[task]["status"] == "success"
        assert sample["limit"]["type"] == task.removesuffix("s")
        assert sample["scores"]["includes"]["value"] == "I"
        [(owner,)] = evaluated.read("SELECT owner FROM sessions WHERE id = ?", sample["store"]["crow"]["session"])
        assert owner is None  # the session was closed


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("down", "There is no such model."),
        ("begun", "crow begins a conversation: a sample with a message of the role assistant is not run."),
        ("elsewhere", 'crow works in the sandbox "local" or in none'),
    ],
)
def test_what_cannot_be_run_is_an_error_of_the_sample(evaluated: Evaluated, task: str, said: str):
    assert said in evaluated.find_sample(task)["error"]["message"].replace("\\'", "'")
    assert not evaluated.find_sample(task)["scores"]


def crow_eval(home: Path, *arguments: Any) -> Any:
    """Run `crow eval` in this process, and return what it prints as JSON."""
    done = CliRunner().invoke(cli, ["eval", *map(str, arguments), "--json"], env={"CROW_HOME": str(home)})
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def fail_eval(home: Path, *arguments: Any) -> str:
    """Run `crow eval`, which has to end with a sentence; return it."""
    done = CliRunner().invoke(cli, ["eval", *map(str, arguments)], env={"CROW_HOME": str(home)})
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("crow: ")
    assert done.stderr.count("\n") == 1
    return done.stderr.removeprefix("crow: ").strip()


def write_log(path: Path, log: dict[str, Any], scores: Mapping[str, Any]) -> Path:
    """Write a log with a sample for each of these scores; None is a sample without a score."""
    sample = log["samples"][0]
    samples = [
        sample | {"id": id, "uuid": id, "scores": {} if value is None else {"s": {"value": value}}}
        for id, value in scores.items()
    ]
    spec = log["eval"] | {"eval_id": path.name, "dataset": {"sample_ids": [*scores]}}
    path.write_text(json.dumps(log | {"eval": spec, "samples": samples}))
    return path


def test_logs_become_evaluations_whose_cells_name_the_sessions_of_crow(evaluated: Evaluated):
    home = evaluated.database.parent
    imported = crow_eval(home, "import", *evaluated.paths)
    assert sum(each["passed"] for each in imported) == 2
    assert sum(each["failed"] for each in imported) == 2
    assert sum(each["error"] for each in imported) == 3
    shown = {one["dataset"]: crow_eval(home, "show", one["id"]) for one in crow_eval(home, "list")}
    [cell], sample = shown["mend"]["cells"], evaluated.find_sample("mend")
    used = sample["model_usage"]["openai-api/scripted/scripted"]
    assert (cell["task"], cell["state"], cell["repetition"]) == ("mend-add", "passed", 1)
    assert cell["variant"] == "crow_eval/crow · openai-api/scripted/scripted"
    assert cell["session"] == sample["store"]["crow"]["session"]
    assert (cell["input"], cell["output"], cell["requests"]) == (used["input_tokens"], used["output_tokens"], 2)
    assert cell["outcome"]["answer"] == "Mended."
    assert len(cell["outcome"]["denied"]) == 1
    assert [check["name"] for check in shown["tokens"]["cells"][0]["outcome"]["checks"]] == ["includes", "limit"]
    assert "There is no such model." in shown["down"]["cells"][0]["outcome"]["error"]
    assert fail_eval(home, "--resume", shown["mend"]["id"]).endswith("and cannot go on here.")

    stored = [evaluated.read(f"SELECT * FROM {table}") for table in ("evaluations", "cells", "messages")]
    again = crow_eval(home, "import", *evaluated.paths)
    assert [(each["id"], each["known"]) for each in again] == [(each["id"], True) for each in imported]
    assert [evaluated.read(f"SELECT * FROM {table}") for table in ("evaluations", "cells", "messages")] == stored


def test_messages_of_samples_become_sessions_where_crow_has_none(evaluated: Evaluated, tmp_path: Path):
    from inspect_ai.log import read_eval_log, write_eval_log

    log = tmp_path / "mend.eval"
    write_eval_log(read_eval_log(str(evaluated.path_of("mend"))), str(log))
    [imported] = crow_eval(tmp_path, "import", log)
    assert imported["left_out"] == {"system prompts": 1}
    [cell] = crow_eval(tmp_path, "show", imported["id"])["cells"]
    assert [cell["session"]] == imported["sessions"]
    with closing(sqlite3.connect(tmp_path / "crow.db")) as database:
        bodies = [json.loads(body) for (body,) in database.execute("SELECT body FROM messages ORDER BY id")]
    said = [(body["role"], body.get("content")) for body in bodies if "role" in body]
    assert [role for role, _ in said] == ["user", "assistant", "tool", "tool", "assistant"]
    assert (said[0][1], said[-1][1]) == ("Mend add.", "Mended.")


def test_scores_become_verdicts_and_partial_ones_fail(evaluated: Evaluated, tmp_path: Path):
    scores = {"C": "C", "I": "I", "P": "P", "N": "N", "yes": "yes", "true": True, "half": 0.5, "one": 1.0, "text": "1"}
    more = {"both": {"a": 1, "b": True}, "one of two": [1, 0], "word": "B", "none": None}
    log = write_log(tmp_path / "log.json", evaluated.logs["mend"], {**scores, **more})
    [imported] = crow_eval(tmp_path, "import", log)
    assert imported["partial"] == 2
    states = {cell["task"]: cell["state"] for cell in crow_eval(tmp_path, "show", imported["id"])["cells"]}
    assert states == {
        **dict.fromkeys(["C", "yes", "true", "one", "text", "both"], "passed"),
        **dict.fromkeys(["I", "P", "N", "half", "one of two"], "failed"),
        **dict.fromkeys(["word", "none"], "error"),
    }
    [lenient] = crow_eval(tmp_path, "import", log, "--pass-at", 0.5)
    assert lenient["passed"] == 8


def test_scores_that_are_no_verdicts_need_a_least_one_or_another_scorer(evaluated: Evaluated, tmp_path: Path):
    log = write_log(tmp_path / "log.json", evaluated.logs["mend"], {"good": 8, "bad": 3})
    said = fail_eval(tmp_path, "import", log)
    assert said.startswith(f"{log}: the score of s for good is 8, which is no verdict.")
    assert fail_eval(tmp_path, "import", log, "--scorer", "x").endswith("Its scorers are: s.")
    [imported] = crow_eval(tmp_path, "import", log, "--pass-at", 7)
    assert (imported["passed"], imported["failed"]) == (1, 1)


@pytest.mark.parametrize("kind", ["cut", "foreign", "missing", "random", "started"])
def test_file_that_is_no_whole_log_is_a_sentence_and_nothing_is_stored(evaluated: Evaluated, tmp_path: Path, kind: str):
    whole, log = evaluated.path_of("mend"), tmp_path / ("log.eval" if kind == "random" else "log.json")
    text = whole.read_text("utf-8")
    match kind:
        case "cut":
            log.write_text(text[: len(text) // 2])
        case "foreign":
            log.write_text('{"samples": []}')
        case "random":
            log.write_bytes(b"PK\3\4" + bytes(range(256)))
        case "started":
            log.write_text(json.dumps(evaluated.logs["mend"] | {"status": "started"}))
        case _:
            pass
    said = fail_eval(tmp_path, "import", whole, log)
    assert str(log) in said
    assert not (tmp_path / "crow.db").exists()


def test_without_inspect_the_command_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "crow_eval.inspect_logs", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "inspect_ai"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "inspect_ai", None)
    assert "uv tool install ./crow --with inspect-ai" in fail_eval(tmp_path, "import", tmp_path / "x.eval")
