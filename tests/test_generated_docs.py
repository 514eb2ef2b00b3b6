"""Pages and pictures that scripts generate, or that show the code, are current."""

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from crow_core import Hooks
from crow_persistence.tables import metadata

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["generate_exit_codes", "generate_python_api"])
def test_generated_page_is_current(name: str, load_script: Callable[[str], ModuleType]):
    script = load_script(name)
    page = script.TARGET
    assert page.read_text("utf-8") == script.render(), f"{page.name} is stale: run `just generate`"


def test_pictures_and_the_page_on_the_schema_are_current(load_script: Callable[[str], ModuleType]):
    for file, content in load_script("draw_docs").render().items():
        assert file.read_text("utf-8") == content, f"{file.name} is stale: run `just generate`"


def test_the_picture_of_the_schema_has_every_table_and_column():
    root = ElementTree.parse(ROOT / "docs" / "images" / "schema.svg").getroot()
    words = [element.text for element in root.iter() if element.tag.endswith("text")]
    for table in metadata.tables.values():
        at = words.index(table.name)
        assert words[at + 1 : at + 1 + 2 * len(table.columns) : 2] == [column.name for column in table.columns]


def test_the_hooks_in_the_picture_of_a_prompt_exist(load_script: Callable[[str], ModuleType]):
    steps = load_script("draw_docs").STEPS
    named = [words.partition(" ")[0] for _, _, words, kind in steps if kind == "hook"]
    assert {*named} <= {*Hooks.__annotations__}
    order = (ROOT / "docs" / "hooks.md").read_text("utf-8").split("```text order")[1].split("```")[0]
    assert named == sorted(named, key=order.index)


def test_the_page_on_the_loop_shows_the_code_of_the_loop():
    code = (ROOT / "crow-core" / "src" / "crow_core" / "react.py").read_text("utf-8")
    page = (ROOT / "docs" / "loop.md").read_text("utf-8")
    shown = "".join(re.findall(r"^```python\n(.*?)^```", page, re.M | re.S))
    whole = code[code.index("async def react") :]
    assert re.sub(r"\n+", "\n", shown) == re.sub(r"\n+", "\n", whole)
