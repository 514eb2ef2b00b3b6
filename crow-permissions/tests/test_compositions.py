"""Command lines that consist of simple commands alone, compared with what bash makes of them."""

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from crow_permissions.compositions import Composition, read_composition
from hypothesis import given, settings
from hypothesis import strategies as st

RECORDER = r"""
command_not_found_handle() {
    builtin printf '%s\0' "$line" "$#" "$@" >> "$log"
    [[ $1 != grep ]]
}
echo() { command_not_found_handle echo "$@"; }
log=$1
cd "$2"
line=0
while IFS= builtin read -r -d '' text; do
    ( cd "$line" && eval "$text" ) < /dev/null > /dev/null 2>&1
    line=$((line + 1))
done
"""
"""Runs each line of its input in a folder of its own, and records the commands that would have run."""

PIECES = [
    *(
        "git",
        "cat",
        "head",
        "grep",
        "echo",
        "sort",
        "wc",
        "ls",
        "rm",
        "sh",
        "x",
        "y.txt",
        "-n",
        "--a=b",
        "5",
        "1",
        "2",
        "a/b",
        "@",
        "%",
        "HEAD~1",
    ),
    *(" ", " ", " ", " ", "  ", "\t", "\n", "\n\n", "\r", "\x0b", "\xa0", "\\\n", "\\ "),
    *("&&", "||", "|", ";", "&", "|&", ";;", "\n", "!", "(", ")", "{", "}", "#"),
    *(
        ">",
        ">>",
        "<",
        ">&",
        "2>",
        "2>&1",
        "1>&2",
        ">|",
        "&>",
        "<>",
        "<<",
        "<<<",
        ">&-",
        " > ",
        " 2> ",
        "/dev/null",
        " > out",
        " >> out",
        " < in",
    ),
    *(
        "'",
        '"',
        "'a b'",
        '"a b"',
        "'$x'",
        '"$x"',
        '"a\\"b"',
        "'a\\'",
        '"\\$x"',
        "''",
        '""',
        "'\n'",
        "'#'",
        '";"',
        "'&'",
        '"a`x`"',
        "$'x'",
        '$"x"',
    ),
    *(
        "$x",
        "$(x)",
        "`x`",
        "~",
        "~/x",
        "*",
        "?",
        "[a]",
        "{a,b}",
        "a=b",
        "A=1 ",
        "\\",
        "$((1))",
        "é",
        "cd . && ",
        "time ",
        "if ",
        "then ",
        "for ",
        "eval ",
    ),
]
SHAPES = [
    ["git status", " && ", "git diff", " | ", "head -5"],
    ["cat x", " | ", "grep -n 'a b'", " | ", "wc -l"],
    ["echo a", " > out", "\n", "ls x", " 2>&1"],
    ["cd .", " && ", "git log", " || ", 'echo "no"'],
    ["grep x y", "; ", "cat < in", " | ", "sort", " >> out"],
]


def make_line(chance: random.Random) -> str:
    """Make a command line: pieces at random, or a usual one in which some pieces are replaced."""
    if chance.random() < 0.3:
        return "".join(chance.choices(PIECES, k=chance.randint(1, 12)))
    line = list(chance.choice(SHAPES))
    for _ in range(chance.randint(0, 4)):
        line.insert(chance.randint(0, len(line)), chance.choice(PIECES))
    if chance.random() < 0.3:
        del line[chance.randrange(len(line))]
    return "".join(line)


def run_lines(lines: list[str], folder: Path) -> tuple[dict[int, list[list[str]]], dict[int, set[str]]]:
    """Run lines with bash, without programs; return the commands of each, and the files that each has written."""
    shutil.rmtree(folder, ignore_errors=True)
    for index in range(len(lines)):
        (folder / "lines" / str(index)).mkdir(parents=True)
        (folder / "lines" / str(index) / "in").touch()
    log = folder / "log"
    log.touch()
    text = b"".join(line.encode() + b"\0" for line in lines)
    bash = shutil.which("bash") or "bash"
    arguments = [bash, "--norc", "-c", RECORDER, "bash", str(log), str(folder / "lines")]
    subprocess.run(arguments, input=text, env={"PATH": "/nonexistent"}, check=False, timeout=60)
    fields = iter(log.read_text().split("\0")[:-1])
    commands: dict[int, list[list[str]]] = {}
    for index in fields:
        commands.setdefault(int(index), []).append([next(fields) for _ in range(int(next(fields)))])
    written = {index: set(os.listdir(folder / "lines" / str(index))) - {"in"} for index in range(len(lines))}
    return commands, written


def check(lines: list[str], folder: Path) -> int:
    """Compare the commands and files of lines that can be read with those of bash; return how many can be read."""
    known = [(line, composition) for line in lines if (composition := read_composition(line))]
    ran, written = run_lines([line for line, _ in known], folder)
    for index, (line, composition) in enumerate(known):
        words = [command.words for command in composition.commands]
        assert all(command in words for command in ran.get(index, [])), (line, words, ran[index])
        files = {os.path.normpath(path).split("/")[0] for path in list_written(composition)}
        assert written[index] <= files, (line, files, written[index])
    return len(known)


def list_written(composition: Composition) -> list[str]:
    """List the files to which the redirections of a command line write."""
    return [path for command in composition.commands for path in command.writes]


@pytest.mark.posix("bash runs the commands")
@settings(deadline=None, max_examples=max(settings.default.max_examples // 10, 3))
@given(st.integers(0, 2**64))
def test_only_the_commands_run_and_only_the_files_are_written_that_were_read(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    chance = random.Random(seed)
    check([make_line(chance) for _ in range(400)], tmp_path_factory.getbasetemp() / "bash")


@pytest.mark.posix("bash runs the commands")
def test_usual_lines_run_as_they_were_read(tmp_path: Path) -> None:
    lines = ["".join(shape) for shape in SHAPES]
    assert check(lines, tmp_path / "bash") == len(lines)
    ran, written = run_lines(lines, tmp_path / "bash")
    for index, line in enumerate(lines):
        composition = read_composition(line)
        assert composition
        reached = [command.words for command in composition.commands if command.joiner != "||"]
        assert sorted(ran[index]) == sorted(reached)
        assert written[index] == set(list_written(composition))


def test_only_what_is_not_plain_loads_the_parser() -> None:
    code = """
import sys
from crow_permissions.compositions import read_composition
from crow_permissions.simple_commands import read_command_line
assert read_command_line("git -C . status").commands
assert "tree_sitter" not in sys.modules
assert read_composition("git status && ls")
assert "tree_sitter" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    "text", ["ls;" * 5_000, "$(" * 10_000, "ls " * 500_000, "'" * 9_999, "ls && " * 2_000, "\ud800", "ls\0"]
)
def test_command_line_that_is_too_much_is_not_read(text: str) -> None:
    assert read_composition(text) is None
