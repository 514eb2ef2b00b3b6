"""The outcomes of an evaluation while the disk is full."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from crow_agent.settings.config import load_config
from crow_agent.settings.home import Home
from crow_core.errors import StoreError
from crow_core.testing import Reply, ScriptedModel
from crow_eval import evaluation_store as store
from crow_eval import runs
from crow_eval.cells import EvaluationSettings, TaskName
from crow_eval.compared_prompts import load_prompts
from crow_eval.evaluation_report import make_report
from crow_eval.page import to_page
from crow_eval.tasks import Task, load_dataset
from crow_persistence.database import Database
from sqlalchemy import Engine, event

pytestmark = pytest.mark.anyio


class FullDisk:
    """A database whose file cannot grow while the disk `is_full`."""

    def __init__(self, home: Path) -> None:
        self.is_full = False
        self.database = Database(f"sqlite:///{home / 'outcomes.db'}", home)
        event.listen(Engine, "begin", self.limit)

    def close(self) -> None:
        event.remove(Engine, "begin", self.limit)
        self.database.close()

    def limit(self, connection: Any) -> None:
        if not str(connection.engine.url.database).endswith("outcomes.db"):
            return
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages if self.is_full else 1 << 30}")


def begin(disk: FullDisk, home: Path, env: dict[str, str]) -> tuple[store.Evaluation, list[Task]]:
    check = {"kind": "answer", "contains": "Yes"}
    lines = [{"id": f"t{n}", "prompt": f"Is it so? {n}", "checks": [check]} for n in range(3)]
    (home / "tasks.jsonl").write_text("\n".join(map(json.dumps, lines)))
    tasks, found = load_dataset(str(home / "tasks.jsonl")), Home.find(env)
    settings = EvaluationSettings(
        tasks=[TaskName(task.id, task.digest) for task in tasks],
        prompts=load_prompts([], load_config(found, env), found, disk.database),
        models=[""],
        names=["scripted"],
        repeat=1,
        mode="accept-edits",
    )
    return store.create(disk.database, "tasks", settings), tasks


async def test_outcome_waits_for_room_on_the_disk_and_is_not_run_again(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(request: Any) -> Reply:
        asked.append(request["messages"][-1]["content"])
        disk.is_full = len(asked) == 2
        return Reply("Yes." + "." * 15_000)

    async def make_room() -> None:
        while not any("wait for it" in each for each in caplog.messages):
            await asyncio.sleep(0.01)
        disk.is_full = False

    monkeypatch.setattr(store, "STORE_INTERVAL", 0.01)
    asked: list[str] = []
    disk, env = FullDisk(home), {"HOME": str(home), "CROW_HOME": str(home / "crow"), "PATH": "/usr/bin:/bin"}
    evaluation, tasks = begin(disk, home, env)
    options: Any = {"env": env, "at_once": 1, "report": lambda cell: None, "model": ScriptedModel(answer)}  # pyright: ignore[reportUnknownLambdaType]
    room = asyncio.ensure_future(make_room())
    with pytest.raises(StoreError, match="cannot grow, as its disk is full"):
        await runs.run_evaluation(evaluation, tasks, disk.database, **options)
    await room
    [told] = caplog.messages
    assert told.endswith("Outcomes that wait for it: 1. ^C gives them up.")
    assert [cell.task for cell in store.load(disk.database, evaluation.id).cells] == ["t0", "t1"]
    await runs.run_evaluation(evaluation, tasks, disk.database, **options)
    assert [cell.task for cell in store.load(disk.database, evaluation.id).cells] == ["t0", "t1", "t2"]
    assert len(asked) == 3
    disk.close()


async def test_outcomes_that_find_no_room_are_told_as_lost(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(request: Any) -> Reply:
        disk.is_full = True
        return Reply("Yes." + "." * 15_000)

    monkeypatch.setattr(store, "STORE_WAIT", 0)
    disk, env = FullDisk(home), {"HOME": str(home), "CROW_HOME": str(home / "crow"), "PATH": "/usr/bin:/bin"}
    evaluation, tasks = begin(disk, home, env)
    with pytest.raises(StoreError, match="Outcomes that are lost, so that their cells run again: 1"):
        await runs.run_evaluation(
            evaluation, tasks, disk.database, env=env, at_once=1, report=print, model=ScriptedModel(answer)
        )
    disk.close()


async def test_a_key_of_the_settings_that_a_check_prints_is_neither_stored_nor_on_the_page(home: Path) -> None:
    key = "sk-Ab3dE5fG7hJ9kL1mN"
    (home / "crow").mkdir()
    (home / "crow" / "config.toml").write_text(
        f'[models.mine]\nmodel = "m"\nbase_url = "http://127.0.0.1:9/v1"\napi_key = "{key}"\n'
    )
    check = {"kind": "command", "run": f"echo {key}; echo {key} >&2; exit 1"}
    (home / "tasks.jsonl").write_text(json.dumps({"id": "t0", "prompt": "Is it so?", "checks": [check]}))
    env = {"HOME": str(home), "CROW_HOME": str(home / "crow"), "PATH": "/usr/bin:/bin"}
    database = Database(f"sqlite:///{home / 'outcomes.db'}", home)
    tasks, found = load_dataset(str(home / "tasks.jsonl")), Home.find(env)
    settings = EvaluationSettings(
        tasks=[TaskName(task.id, task.digest) for task in tasks],
        prompts=load_prompts([], load_config(found, env), found, database),
        models=[""],
        names=["scripted"],
        repeat=1,
        mode="accept-edits",
    )
    evaluation = store.create(database, "tasks", settings)
    model = ScriptedModel([Reply(f"It is {key}.")])
    await runs.run_evaluation(evaluation, tasks, database, env=env, at_once=1, report=lambda cell: None, model=model)
    again = store.load(database, evaluation.id)
    (cell,) = again.cells
    stored, page = repr(cell), to_page(make_report(again))
    database.close()
    assert cell.state == "failed"
    assert "[secret]" in stored
    assert "[secret]" in page
    assert key not in stored
    assert key not in page
