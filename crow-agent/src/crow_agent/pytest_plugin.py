"""The pytest plugin: the fixture `crow`, and cassettes.

pytest imports this module whenever it starts: all else is imported where a test uses it.
"""

import re
import shlex
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from crow_agent.cassette import Cassette
    from crow_agent.testing import CrowFixture

FIXTURE: "pytest.StashKey[CrowFixture]" = pytest.StashKey()
"""The fixture of a test."""
CASSETTE: "pytest.StashKey[Cassette]" = pytest.StashKey()
"""The cassette of a test that has one."""
RECORDED: pytest.StashKey[dict[Path, str]] = pytest.StashKey()
"""The cassettes that were recorded in this run, with the tests that did."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("crow").addoption(
        "--crow-record",
        action="store_true",
        help="record the cassettes of the tests anew, from the configured endpoint",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RECORDED] = {}
    config.addinivalue_line(
        "markers",
        "crow_cassette(name='', ignore=()): let the fixture `crow` replay cassettes/NAME.jsonl, beside the test's "
        "file; `ignore` are regular expressions for what may differ in requests.",
    )


@pytest.fixture
def crow(
    request: pytest.FixtureRequest, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> "Generator[CrowFixture]":
    """Agents whose model plays a script or a cassette: `crow.model.plays(…)`, `crow.prompt(…)`, `crow.called(…)`."""
    from crow_agent.testing import CrowFixture

    item: Any = request.node
    home = tmp_path_factory.mktemp("crow-home")
    item.stash[FIXTURE] = fixture = CrowFixture(tmp_path, home, open_cassette(item, tmp_path, home))
    yield fixture
    fixture.close()


def open_cassette(item: pytest.Item, folder: Path, home: Path) -> "Cassette | None":
    """Open the cassette that a test is marked with; None if it has none."""
    if (marker := item.get_closest_marker("crow_cassette")) is None:
        return None
    from crow_agent.cassette import Cassette, CassetteError

    path = find_cassette(item, *marker.args, **{key: marker.kwargs[key] for key in marker.kwargs if key != "ignore"})
    recording, recorded = bool(item.config.getoption("crow_record")), item.config.stash[RECORDED]
    if recording and (other := recorded.setdefault(path, item.nodeid)) != item.nodeid:
        pytest.fail(f"{path} is recorded by {other} already. Give each test a cassette of its own.", pytrace=False)
    replacements = {str(each): "<tmp_path>" for each in (folder, folder.resolve())}
    replacements |= {str(each): "<home>" for each in (home, home.resolve())}
    try:
        cassette = Cassette(
            path,
            recording=recording,
            how=f"pytest --crow-record {shlex.quote(item.nodeid)}",
            replacements=replacements,
            ignore=marker.kwargs.get("ignore", ()),
        )
    except CassetteError as error:
        pytest.fail(str(error), pytrace=False)
    item.stash[CASSETTE] = cassette
    return cassette


def find_cassette(item: pytest.Item, name: str = "") -> Path:
    """Return the file of a test's cassette: by default of the test's own name, and one for each of its parameters."""
    parameters = getattr(getattr(item, "callspec", None), "id", "")
    names = [each.name for each in item.listchain() if isinstance(each, pytest.Class)]
    names += [getattr(item, "originalname", item.name)]
    name = name or ".".join([item.path.stem, *names])
    name = f"{name}-{parameters}" if parameters else name
    return item.path.parent / "cassettes" / (re.sub(r"[^\w./-]+", "_", name) + ".jsonl")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fail a test whose script or cassette was asked for more, or was not played to its end; write what it recorded."""
    error: BaseException | None = None
    result = None
    try:
        result = yield
    except (Exception, pytest.fail.Exception) as raised:
        error = raised
    if (fixture := item.stash.get(FIXTURE, None)) is not None:
        cassette = item.stash.get(CASSETTE, None)
        if cassette is not None and cassette.recording:
            cassette.save(replace=error is None)
        if fault := fixture.find_fault() or ("" if error else fixture.describe_unplayed()):
            pytest.fail(fault, pytrace=False)
    if error is not None:
        raise error
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the tool calls to the report of a test that failed."""
    report = yield
    fixture = item.stash.get(FIXTURE, None)
    if fixture and report.when == "call" and report.failed and (text := fixture.describe_calls()):
        add_section = getattr(report.longrepr, "addsection", None)
        if add_section is not None:
            add_section("tool calls", text, "-")
    return report
