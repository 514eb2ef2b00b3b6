"""The page of an evaluation's report, also in a browser."""

import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from urllib.parse import unquote

import pytest
from crow_eval.cells import Cell, CellOutcome, EvaluationSettings, TaskName
from crow_eval.checks import CheckResult
from crow_eval.compared_prompts import PromptVersion
from crow_eval.evaluation_report import find_last_words, make_report
from crow_eval.evaluation_store import Evaluation
from crow_eval.page import to_page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = "<script>document.title = 'taken'</script><img src=x onerror=alert(1)>"


def make_evaluation(tasks: int = 12) -> Evaluation:
    """Make an evaluation in which the second prompt is better; some runs are errors, and one is missing."""
    random = Random(3)
    settings = EvaluationSettings(
        tasks=[TaskName(f"task-{n:02}", "d") for n in range(tasks)],
        prompts=[PromptVersion("current", "system", "a"), PromptVersion("new.md.j2", "system", "b")],
        models=["small", "large"],
        names=["qwen3-coder", "glm-5-air"],
        repeat=3,
        mode="yolo",
        crow="0.1.0",
    )
    cells: list[Cell] = []
    for task in settings.tasks:
        for variant in settings.variants:
            for repetition in (1, 2, 3):
                passed = random.random() < (0.25, 0.45, 0.75, 0.9)[variant.number]
                state = "error" if random.random() < 0.02 else "passed" if passed else "failed"
                words = "All done." if passed else random.choice(["I could not find the file.", "It works now!", ""])
                checks = [
                    CheckResult(name="command: pytest -q", kind="command", passed=passed, reason="" if passed else "E"),
                    CheckResult(name=f"file: {HOSTILE}", kind="file", passed=passed or repetition == 1, reason=HOSTILE),
                ]
                error = "The endpoint is down." if state == "error" else ""
                cells.append(
                    Cell(
                        task=task.id,
                        variant=variant.number,
                        repetition=repetition,
                        session=f"{len(cells):032x}",
                        state=state,
                        outcome=CellOutcome(checks=[] if error else checks, answer=f"{HOSTILE}\n{words}", error=error),
                        requests=random.randint(2, 14),
                        input=random.randint(4_000, 90_000),
                        output=random.randint(100, 4_000),
                        cached=random.randint(1_000, 4_000),
                        cost=0.01,
                        currency="EUR",
                        first=random.uniform(80, 900),
                        total=random.lognormvariate(9.5, 0.6),
                    )
                )
    cells.pop()
    return Evaluation(1, "ab" * 16, "/tmp/my tasks", settings, 1_764_000_000_000, None, cells)


class PageReader(HTMLParser):
    """Reads the tags and the addresses of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: set[str] = set()
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self.ids.add(given.get("id") or "")
        self.targets += [value for name in ("href", "src") if (value := given.get(name))]


def test_page_holds_everything_itself_and_escapes_texts_of_models() -> None:
    evaluation = make_evaluation()
    page = to_page(make_report(evaluation))
    reader = PageReader()
    reader.feed(page)
    assert not {"script", "img", "link", "iframe"} & {*reader.tags}
    assert all(target.startswith("#") for target in reader.targets)
    assert {unquote(target[1:]) for target in reader.targets} <= reader.ids, "each square leads to its run"
    assert all(cell.session in page for cell in evaluation.cells)
    assert "The endpoint is down." in page
    assert page.count("<svg") == 4


def test_page_of_an_evaluation_without_outcomes_is_whole() -> None:
    evaluation = make_evaluation(2)
    evaluation.cells.clear()
    assert "0 of 24 cells have ended" in to_page(make_report(evaluation))


@pytest.mark.parametrize(
    ("answer", "words"),
    [("", "(no answer)"), ("One.\n\nI ran 12 tests. 3 failed!\n", "# failed!"), ("x" * 200, "x" * 89 + "…")],
)
def test_last_words_are_the_last_sentence(answer: str, words: str) -> None:
    assert find_last_words(answer) == words


@pytest.mark.skipif(
    not CHROMIUM and os.environ.get("CROW_TEST_ALL") != "1",  # which `.ci/run` sets: there it fails
    reason="Chromium is not installed; Debian's package is chromium.",
)
def test_browser_draws_the_page_and_runs_nothing_in_it(tmp_path: Path) -> None:
    (page := tmp_path / "report.html").write_text(to_page(make_report(make_evaluation())), "utf-8")
    image = Path(os.environ.get("CROW_TEST_IMAGE") or tmp_path / "report.png")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1100,3300"]
    run = [str(CHROMIUM), *options, f"--screenshot={image}", "--dump-dom", page.as_uri()]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, check=True)
    assert "<title>my tasks · crow eval abababab</title>" in done.stdout, "no script has changed it"
    assert "task-11" in done.stdout
    assert image.stat().st_size > 50_000


def test_texts_of_charts_can_be_read_on_a_phone() -> None:
    """On 390 pixels, less the margins of the page and the section, 13 units are at least 10 pixels high."""
    page = to_page(make_report(make_evaluation()))
    widths = {float(width) for width in re.findall(r'viewBox="0 0 (\S+) ', page)}
    assert len(widths) == 1
    assert 13 * 300 / widths.pop() >= 10
