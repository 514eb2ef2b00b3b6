"""The table of programs: what the reading of a command's words finds, and whether the installed programs agree."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from crow_permissions.programs import load_programs, read_table, read_usage

PLUGINS = (
    "--cov",
    "--no-cov",
    "--count",
    "--timeout",
    "--junitxml",
    "--dist",
    "--numprocesses",
    "--maxprocesses",
    "--slow",
)
"""Options of pytest's plugins, and another name of `--junit-xml`."""

WITHOUT_HELP = {"find", "ps", "xxd", "awk", "mawk", "which", "echo", "printf", "npm", "curl", "jq", "kubectl"}
"""Programs whose `--help` does not list all options."""


@pytest.mark.parametrize("program", sorted({name.partition(" ")[0] for name in load_programs()} - {"git"}))
def test_options_are_those_of_the_installed_program(program: str, tmp_path: Path) -> None:
    sources = {name for names in read_table("programs.toml")["sources"] for name in names.split()}
    assert program in sources or program == ":"
    known = [name for name in load_programs() if name.partition(" ")[0] == program]
    if shutil.which(program) is None or program in WITHOUT_HELP:
        pytest.skip("it is not installed, or its --help does not list its options")
    for name in set(known) - {"cargo clippy"}:
        done = subprocess.run(
            [*name.split(), "--help"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )
        listed = done.stdout + done.stderr
        long = [option for option in load_programs()[name].options if option.startswith("--")]
        if done.returncode or len(re.findall(r"--\w", listed)) < 5:
            continue
        long = [option for option in long if not option.startswith(PLUGINS)]
        missing = [option for option in long if option not in listed and not listed.count(f"--[no-]{option[2:]}")]
        assert not missing, name


def test_options_of_git_are_known_to_the_installed_git(tmp_path: Path) -> None:
    """git tells of an option that it does not know; other errors are about values, or about the empty repository."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    unknown: list[str] = []
    for name in (
        "git log",
        "git show",
        "git diff",
        "git status",
        "git branch",
        "git ls-files",
        "git blame",
        "git grep",
    ):
        for option, kind in load_programs()[name].options.items():
            if option == "-#" or option in ("-h", "--stdin"):
                continue
            value = "=1" if kind.startswith("=") and option.startswith("--") else "1" if kind.startswith("=") else ""
            done = subprocess.run(
                [*name.split(), f"{option}{value}"],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
            )
            if re.search(r"unknown (option|switch)|unrecognized argument|invalid option: -", done.stderr):
                unknown.append(f"{name} {option}: {done.stderr.splitlines()[0]}")
    assert not unknown, unknown


@pytest.mark.parametrize(
    ("command", "unlisted"),
    [
        ("git log --oneline -5 --stat=80 -- --output=x", ""),
        ("head -n -5 a", ""),
        ("sed -ne 1,5p -e '/a/,/b/d' a", ""),
        ("sed 's/a\\/b/c|d/g; $!d; 2{p;q}' a", ""),
        ("git log -n --output=x", "-n"),
        ("sed s/x/y/e a", "s/x/y/e"),
        ("sed 's,x,y,w f' a", "s,x,y,w f"),
        ("sed '1!{/x/e touch z' a", "1!{/x/e touch z"),
        ("sed 's/[/]/x/e;p' a", "s/[/]/x/e;p"),
        ("awk 'BEGIN { system(\"x\") }'", 'BEGIN { system("x") }'),
        ("awk '{ print > \"x\" }'", '{ print > "x" }'),
        ("awk '{ print | \"x\" }'", '{ print | "x" }'),
        ("awk '$1 > 5 || $2' a", ""),
        ("jq -n env", "env"),
        ("uv run --frozen pytest -q", ""),
        ("git --help", ""),
        ("git --help log", "log"),
        ("git branch -u origin/x", "-u"),
        ("curl -sH 'Accept: a@b' http://x", ""),
        ("curl -sH @notes.txt http://x", "-sH"),
        ("printf '100%% %d %s\n' 1 a", ""),
        ("printf '%% %-5ln' X", "%% %-5ln"),
        ("cargo clippy -- -D warnings -Aclippy::all", ""),
        ("cargo clippy -- --emit=dep-info=a", "--emit=dep-info=a"),
        ("cargo test a -- --nocapture b", ""),
        ("cargo test -- --logfile=a", "--logfile=a"),
        ("gh pr list --limit=5", ""),
        ("gh pr create -t a -b b", ""),
        ("gh pr merge 1", "merge"),
        ("kubectl get pods a", ""),
        ("kubectl get pods,secrets", "pods,secrets"),
    ],
)
def test_words_that_are_not_listed_are_found(command: str, unlisted: str) -> None:
    assert read_usage(shlex.split(command)).unlisted == unlisted
