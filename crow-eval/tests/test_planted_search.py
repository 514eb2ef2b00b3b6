"""Searches with a planted optimum, and without one: a scripted model whose success depends on three sentences.

The tasks are of two kinds. Each is done in nine of ten runs with the sentence of its kind, else in one of ten.
A third sentence spoils half of all runs. Proposals add or remove one of the three: the one that a failed run names in
half of the cases, else any.
"""

import json
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
from crow_core.testing import Reply, ScriptedServer
from crow_eval.commands.improve_command import improve_prompt

pytestmark = pytest.mark.anyio
START = "You work in {{ cwd }}."
SENTENCES = ("Look before you write.", "Check the result twice.", "Be quick.")
LOOK, CHECK, HURRY = SENTENCES
SEEDS = 20 if os.environ.get("CROW_SOAK") else 5
MISSES = max(1, SEEDS // 10)
TASKS = 24


@dataclass
class PlantedModel:
    """A model that does tasks by chance and proposes sentences."""

    seed: int
    has_optimum: bool
    runs: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    proposals: int = 0

    def __call__(self, request: dict[str, Any]) -> Reply:
        system, prompt = request["messages"][0]["content"], request["messages"][1]["content"]
        return Reply(self.propose(prompt) if system.startswith("You improve a text") else self.work(system, prompt))

    def work(self, system: str, prompt: str) -> str:
        """Do a task, or say why not."""
        there = ", ".join(sentence for sentence in SENTENCES if sentence in system)
        self.runs[there, prompt] += 1
        chance = Random(f"{self.seed} {there} {prompt} {self.runs[there, prompt]}").random
        if not self.has_optimum:
            return prompt.upper() if chance() < 0.5 else "It did not work."
        needed = Random(f"{self.seed} {prompt}").choice((LOOK, CHECK))
        if HURRY in there and chance() < 0.5:
            return f"I was too fast. {HURRY}"
        done = chance() < (0.9 if needed in there else 0.1)
        return prompt.upper() if done else f"I missed something. {needed}"

    def propose(self, question: str) -> str:
        """Add a sentence, or remove it if it is there."""
        self.proposals += 1
        match = re.search(r"```\n(.*?)\n```(.*)", question, re.DOTALL)
        assert match
        text, seen = match[1], [sentence for sentence in SENTENCES if sentence in match[2]]
        chance = Random(f"{self.seed} {self.proposals}")
        chosen = chance.choice(seen if seen and chance.random() < 0.5 else SENTENCES)
        return f"```\n{text.replace(f' {chosen}', '') if chosen in text else f'{text} {chosen}'}\n```"

    def find_rate(self, text: str) -> float:
        """Return the true pass rate of a prompt."""
        if not self.has_optimum:
            return 0.5
        return sum(0.9 if each in text else 0.1 for each in (LOOK, CHECK)) / 2 * (0.5 if HURRY in text else 1)


async def improve(model: PlantedModel, folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Search with a model, and return the report, with the texts of the candidates."""
    lines = [
        {"prompt": f"word {n:03}", "checks": [{"kind": "answer", "contains": f"WORD {n:03}"}]} for n in range(TASKS)
    ]
    (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, lines)))
    async with ScriptedServer(model) as server:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {"CROW_HOME": folder / "crow", "OPENAI_BASE_URL": server.url}.items():
                patch.setenv(name, str(value))
            patch.setenv("OPENAI_API_KEY", "key")
            patch.setenv("CROW_MODEL", "scripted")
            options = {"model": "", "proposer": "", "judge": "", "repeat": 2, "mode": "accept-edits", "max_runs": 60}
            dataset = str(folder / "tasks.jsonl")
            code = await improve_prompt(
                "system", [dataset], "", {}, as_json=True, at_once=8, seed=model.seed, **options
            )
    output = capsys.readouterr()
    assert code == 0, output.err
    return json.loads(output.out)


async def search_all(
    seeds: range, folder: Path, capsys: pytest.CaptureFixture[str], *, has_optimum: bool
) -> Counter[str]:
    """Search once a seed; count what came of it."""
    found: Counter[str] = Counter()
    (prompts := folder / "crow" / "prompts").mkdir(parents=True)
    (prompts / "system.md.j2").write_text(START)
    for seed in seeds:
        model = PlantedModel(seed, has_optimum)
        report = await improve(model, folder, capsys)
        assert report["took"]["search"]["runs"] <= 60
        best = next(each for each in report["candidates"] if each["prompt"] == report["best"])["template"]
        found["optimum"] += LOOK in best and CHECK in best and HURRY not in best
        found["better"] += report["better"]
        pairs = report["comparison"] and report["comparison"]["pairs"]
        true = model.find_rate(best) - model.find_rate(START)
        found["interval"] += not pairs or pairs["interval"]["low"] <= true <= pairs["interval"]["high"]
        found["runs"] += report["took"]["search"]["runs"]
    with capsys.disabled():
        print(f"\n{'with' if has_optimum else 'without'} an optimum, {len(seeds)} seeds: {dict(found)}")
    return found


async def test_planted_optimum_is_found_and_shown_to_be_better(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    found = await search_all(range(1), tmp_path, capsys, has_optimum=True)
    assert (found["optimum"], found["better"]) == (1, 1)


async def test_without_an_optimum_nothing_is_shown_to_be_better(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert (await search_all(range(1), tmp_path, capsys, has_optimum=False))["better"] == 0


@pytest.mark.slow
async def test_planted_optimum_is_found_in_nearly_all_searches(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    found = await search_all(range(SEEDS), tmp_path, capsys, has_optimum=True)
    assert found["optimum"] >= SEEDS - MISSES
    assert found["interval"] >= SEEDS - 1


@pytest.mark.slow
async def test_without_an_optimum_nearly_all_searches_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert (await search_all(range(SEEDS), tmp_path, capsys, has_optimum=False))["better"] <= 1
