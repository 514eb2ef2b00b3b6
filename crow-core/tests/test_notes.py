"""`messages/notes.py` documents the format of the log: it names what all packages write, and nothing else."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

from crow_core.messages import notes
from crow_core.messages.tool_metadata import DefinitionMeta, ResultMeta

DESCRIPTIONS = ("notes.py", "tool_metadata.py", "schema.py")
SOURCES = [
    path
    for path in Path(__file__).parents[2].glob("crow-*/src/**/*.py")
    if not {"project", "suites", "migrations"} & {*path.parts} and path.name not in DESCRIPTIONS
]
MODULES = {path.with_suffix("").as_posix(): ast.parse(path.read_text("utf-8")) for path in SOURCES}
TREES = [*MODULES.values()]
COMMON = {"id", "kind"}
REQUESTS = {
    f"crow/{name}"
    for name in ["session", "call", "cwd", "roots", "readable", "folder", "path", "env", "environment", "dry_run"]
}
"""The metadata of the request to a tool; see `Session.meta`."""


def constants_of(tree: ast.Module) -> dict[str, str]:
    """The texts that a module has under a name of its own, or of a module that it imports the name from."""
    found: dict[str, str] = {}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))):
                found[name] = text
            case ast.ImportFrom(module=str(module), names=names) if "KIND" in {name.name for name in names}:
                (source,) = (tree for name, tree in MODULES.items() if name.endswith(module.replace(".", "/")))
                found |= constants_of(source)
            case _:
                pass
    return found


def markers_of(tree: ast.Module) -> Iterator[tuple[str, set[str]]]:
    """The kinds and keys of the markers that a module writes as literals."""
    known = constants_of(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Dict(keys=[ast.Constant(value="crow")], values=[ast.Dict() as found]):
                pass
            case ast.Call(func=ast.Name(id="cast"), args=[ast.Name(id="Notes"), ast.Dict() as found]):
                pass
            case ast.AnnAssign(annotation=ast.Name(id="Notes"), value=ast.Dict() as found):
                pass
            case _:
                continue
        literal = {key.value: value for key, value in zip(found.keys, found.values, strict=True) if is_text(key)}
        match literal.pop("kind", None):
            case ast.Constant(value=str(kind)):
                yield kind, {*literal}
            case ast.Name(id=name) if name in known:
                yield known[name], {*literal}
            case ast.Name(id="kind"):  # one of two kinds with the same notes
                yield "private", {*literal}
                yield "untrusted", {*literal}
            case _:
                pass


def is_text(key: Any) -> bool:
    return isinstance(key, ast.Constant) and isinstance(key.value, str)


def written_keys() -> set[str]:
    """All texts that the packages use as a key of a literal, set under a key, or give by name."""
    found: set[str] = set()
    for tree in TREES:
        for node in ast.walk(tree):
            match node:
                case ast.Dict(keys=keys):
                    found |= {key.value for key in keys if is_text(key)}  # pyright: ignore
                case ast.Subscript(slice=ast.Constant(value=str(key)), ctx=ast.Store()):
                    found.add(key)
                case ast.Call(func=ast.Attribute(attr="setdefault"), args=[ast.Constant(value=str(key)), *_]):
                    found.add(key)
                case ast.keyword(arg=str(key)):
                    found.add(key)
                case ast.AnnAssign(target=ast.Name(id=key)):  # a struct that is converted
                    found.add(key)
                case _:
                    pass
    return found


WRITTEN = [marker for tree in TREES for marker in markers_of(tree)]


def test_every_kind_of_marker_that_is_written_is_documented_and_no_other():
    assert {kind for kind, _ in WRITTEN} == {*notes.MARKERS}


def test_markers_have_only_the_notes_that_are_documented_for_their_kind():
    unknown = [(kind, keys - get_type_hints(notes.MARKERS[kind]).keys()) for kind, keys in WRITTEN]
    assert [(kind, keys) for kind, keys in unknown if keys - COMMON] == []


def test_the_notes_of_any_entry_are_those_of_all_messages_and_markers():
    apart = {"worktree"}  # its `changes` have another form
    of_messages = [notes.PromptNotes, notes.ReplyNotes, notes.AnswerNotes]
    of_markers = [each for kind, each in notes.MARKERS.items() if kind not in apart]
    hints = [get_type_hints(each) for each in (*of_messages, *of_markers)]
    assert COMMON.union(*hints) == get_type_hints(notes.Notes).keys()


def test_every_note_that_is_documented_is_written_somewhere():
    documented = [each for each in vars(notes).values() if isinstance(each, type) and hasattr(each, "__total__")]
    keys = {key for each in documented for key in get_type_hints(each)}
    assert sorted(keys - written_keys()) == []


def test_every_fact_in_the_metadata_of_tools_is_documented():
    known = get_type_hints(ResultMeta).keys() | get_type_hints(DefinitionMeta).keys()
    texts = {
        node.value
        for tree in TREES
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("crow/")
    }
    assert {text for text in texts if " " not in text} - known - REQUESTS == set()
