"""Test how paths are spelled and compared, by the rules of both kinds of systems."""

import ntpath
import os

import pytest
from crow_core.paths import from_uri, is_below, to_relative, to_subject
from crow_permissions.protected import find_protection
from crow_permissions.rules import parse_rule
from hypothesis import given
from hypothesis import strategies as st

NAMES = st.text(st.sampled_from("aAbZ .-_éß0"), min_size=1, max_size=6).filter(lambda name: name.strip(". "))
FOLDERS = st.builds(
    ntpath.join,
    st.sampled_from(["C:\\", "d:\\", "\\\\host\\share\\", "C:\\Users\\A B"]),
    st.builds("\\".join, st.lists(NAMES)),
)


@pytest.mark.parametrize(
    ("path", "spelled"),
    [
        ("C:\\project\\.git\\hooks\\x", ".git/hooks/x"),
        ("c:\\PROJECT\\src\\a.py", "src/a.py"),
        ("C:\\project\\.env.", ".env"),
        ("C:\\project\\.env  ", ".env"),
        ("C:\\project\\.env::$DATA", ".env"),
        ("\\\\?\\C:\\project\\" + "x" * 300, "x" * 300),
        ("C:\\project", "."),
        ("C:\\project-twin\\a", "C:/project-twin/a"),
        ("D:\\project\\a", "D:/project/a"),
        ("\\\\?\\UNC\\host\\share\\a", "//host/share/a"),
    ],
)
def test_rules_name_a_path_of_windows_with_slashes_and_by_one_spelling(path: str, spelled: str):
    assert to_relative(path, "C:\\project", windows=True) == spelled


@given(FOLDERS, st.lists(NAMES, min_size=1))
def test_path_below_a_folder_of_windows_is_below_it_in_any_case(folder: str, names: list[str]):
    path = ntpath.join(folder, *names)
    assert is_below(path, folder, windows=True)
    assert is_below(path.replace("\\", "/"), folder.swapcase(), windows=True) or "ß" in folder
    relative = to_relative(path, folder, windows=True)
    assert not ntpath.isabs(relative)
    assert "\\" not in relative
    assert to_subject(ntpath.join(folder, relative), windows=True) == to_subject(path, windows=True)


@given(FOLDERS, NAMES, NAMES)
def test_path_beside_a_folder_of_windows_is_not_below_it(folder: str, name: str, other: str):
    beside = ntpath.join(folder, name)
    assert not is_below(folder, beside, windows=True)
    assert not is_below(f"{beside}-twin\\{other}", beside, windows=True)
    assert not is_below("E:\\" + other, beside, windows=True)


@pytest.mark.posix("names there have no backslashes")
@given(st.lists(st.text(st.characters(exclude_characters="/\0", codec="utf-8"), min_size=1, max_size=5), max_size=5))
def test_linux_paths_stay_as_they_are(names: list[str]):
    path = os.path.normpath("/" + "/".join(names))
    assert to_subject(path, windows=False) == path
    for folder in {path, os.path.dirname(path), "/"}:
        assert is_below(path, folder, windows=False)
        assert to_relative(path, folder, windows=False) == os.path.relpath(path, folder)


@pytest.mark.parametrize(
    ("host", "path", "expected"),
    [
        ("", "/C:/a%20b.py", "C:/a b.py"),
        ("", "/c%3A/a.py", "c:/a.py"),
        ("", "/C|/a.py", "C:/a.py"),
        ("localhost", "/C:/a.py", "C:/a.py"),
        ("host", "/share/a.py", "//host/share/a.py"),
    ],
)
def test_file_uri_of_windows_names_a_drive_or_a_share(host: str, path: str, expected: str):
    assert from_uri(host, path, windows=True) == expected


def test_file_uri_of_linux_may_look_like_a_drive():
    assert from_uri("", "/C:/a.py", windows=False) == "/C:/a.py"


def test_file_that_runs_later_is_protected_on_windows_in_each_spelling():
    for path in (".git\\hooks\\pre-commit", ".GIT\\Hooks\\pre-commit", ".git.\\hooks \\pre-commit::$DATA"):
        assert find_protection(to_relative("C:\\project\\" + path, "C:\\project", windows=True)), path


def test_denied_file_is_denied_in_each_case_of_its_letters():
    rule = parse_rule("file_editor:Secrets/*")
    assert rule.matches_any("file_editor", ["secrets/A"])
    assert rule.matches_any("file_editor", ["SECRETS/a"])
    assert parse_rule("terminal:RM *").matches_any("terminal", ["rm a"], ignores_case=True)
    assert not parse_rule("terminal:RM *").matches_any("terminal", ["rm a"], ignores_case=False)
    assert not rule.matches("file_editor", "secrets/A")  # what allows stays exact
