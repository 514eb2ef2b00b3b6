"""The simple commands of a command line."""

import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import pytest
from crow_permissions.command_tables import get_tables
from crow_permissions.compositions import read_composition
from crow_permissions.shell_words import UNKNOWN
from crow_permissions.simple_commands import LENGTH_LIMIT, get_parser, read_command_line
from hypothesis import example, given, settings
from hypothesis import strategies as st

HIDDEN = [
    ">/dev/null rm x",
    "2>&1 rm x",
    "<in rm x",
    "A=1 rm x",
    "A=1 B=2 rm x",
    "A+=1 rm x",
    "! rm x",
    "{ rm x; }",
    "(rm x)",
    "( ( rm x ) )",
    "true; rm x",
    "true && rm x",
    "true || rm x",
    "true & rm x",
    "true\nrm x",
    "true | rm x",
    "true |& rm x",
    "rm x &",
    "if true; then rm x; fi",
    "if rm x; then true; fi",
    "if true; then true; else rm x; fi",
    "while rm x; do true; done",
    "until rm x; do true; done",
    "for a in b; do rm x; done",
    "for a in $(rm x); do true; done",
    "for ((i=0;i<1;i++)); do rm x; done",
    "case a in a) rm x;; esac",
    "case $(rm x) in a) true;; esac",
    "select a in b; do rm x; done",
    "f() { rm x; }; f",
    "function f { rm x; }; f",
    "[[ -f a ]] && rm x",
    "[ -f a ] && rm x",
    "a=$(rm x)",
    "a=`rm x`",
    "export a=$(rm x)",
    "local a=$(rm x)",
    "echo $(rm x)",
    "echo `rm x`",
    'echo "$(rm x)"',
    'echo "a `rm x` b"',
    "echo ${a:-$(rm x)}",
    "echo $((1 + $(rm x)))",
    "cat <(rm x)",
    "cat > >(rm x)",
    "cat <<E\n$(rm x)\nE",
    'cat <<< "$(rm x)"',
    "rm\tx",
    "rm   x",
    "r\\m x",
    "\\rm x",
    "'rm' x",
    '"rm" x',
    'r"m" x',
    "r'm' x",
    'r""m x',
    "rm'' x",
    "$'rm' x",
    "rm 'x'",
    "r\\\nm x",
    "rm \\\n x",
    "/bin/rm x",
    "./rm x",
    "~/rm x",
    "time rm x",
    "time -p rm x",
    "command rm x",
    "command -p rm x",
    "builtin rm x",
    "exec rm x",
    "exec -a y rm x",
    "eval rm x",
    "eval 'rm x'",
    "eval 'eval \"rm x\"'",
    "env rm x",
    "env A=1 rm x",
    "env -i rm x",
    "env -u A rm x",
    "env --unset=A rm x",
    "env -C / rm x",
    "env -S 'rm x'",
    "env -S'rm x'",
    "env --split-string='rm x'",
    "/usr/bin/env rm x",
    "nohup rm x",
    "setsid rm x",
    "setsid -w rm x",
    "nice rm x",
    "nice -n 5 rm x",
    "nice -5 rm x",
    "ionice -c 3 rm x",
    "timeout 5 rm x",
    "timeout 5s rm x",
    "timeout -s KILL 5 rm x",
    "timeout --signal=KILL 5 rm x",
    "timeout -k 1 5 rm x",
    "timeout --preserve-status 5 rm x",
    "stdbuf -oL rm x",
    "stdbuf -o L rm x",
    "xargs rm x",
    "xargs -n 1 rm x",
    "xargs -n1 rm x",
    "xargs -0 -I {} rm x",
    "xargs -P 4 -L 1 rm x",
    "echo x | xargs rm x",
    "parallel -j 2 rm x",
    "sudo rm x",
    "sudo -u root rm x",
    "sudo -n rm x",
    "sudo -- rm x",
    "sudo -E A=1 rm x",
    "doas -u root rm x",
    "chroot / rm x",
    "unshare -r rm x",
    "flock file rm x",
    "flock -n file rm x",
    "flock file -c 'rm x'",
    "watch -n 1 rm x",
    "strace -o f rm x",
    "taskset 1 rm x",
    "taskset -c 0 rm x",
    "strace --trace-path a --user b rm x",
    "sudo -n -E -u root rm x",
    "setpriv --securebits a --euid 0 rm x",
    "docker-compose run a rm x",
    "setpriv --reuid 0 rm x",
    "systemd-run -p A=b rm x",
    "busybox rm x",
    "toybox rm x",
    "coproc rm x",
    "sh -c 'rm x'",
    "bash -c 'rm x'",
    "bash -lc 'rm x'",
    "bash -e -c 'rm x'",
    "bash -o pipefail -c 'rm x'",
    "bash --norc -c 'rm x'",
    "/bin/sh -c 'rm x'",
    "zsh -c 'rm x'",
    "sh -c \"sh -c 'rm x'\"",
    "su -c 'rm x'",
    "su root -c 'rm x'",
    "script -c 'rm x' out",
    "find . -exec rm x ;",
    "find . -name a -exec rm x \\;",
    "find . -exec rm x {} +",
    "find . -execdir rm x \\;",
    "find . -ok rm x \\;",
    "find . -exec sh -c 'rm x' \\;",
    "fd a -x rm x",
    "fd a --exec rm x",
    "nohup setsid nice timeout 5 env A=1 rm x",
    "sudo sh -c 'env A=1 xargs rm x'",
    "trap 'rm x' EXIT",
]
"""Command lines in which `rm x` runs."""

PUSHES = [
    "git push",
    "git  push",
    "git -C . push",
    "git -C. push",
    "git --git-dir=.git push",
    "git --git-dir .git push",
    "git --work-tree=. push",
    "git --no-pager push",
    "git -p push",
    "git -P push origin main",
    "git --namespace=a push",
    "git --bare push",
    "git -c a=b push",
    "git --config-env=a=B push",
    "git --config-env a=B push",
    "git --literal-pathspecs push",
    "git -C a -C b push",
    "git send-pack origin",
    "git -C . send-pack origin",
    "/usr/bin/git push",
    "git 'push'",
    'git "push"',
    "git pu\\sh",
    "git pu''sh",
    "env git -C . push",
    "timeout 5 git --no-pager push",
    "sh -c 'git -C . push'",
]
"""Command lines that push."""

UNCLEAR_PUSHES = [
    "git $A",
    "git $A push",
    "git $(echo push)",
    "git -C . $A",
    "git -c alias.p=push p",
    "git --config-env=alias.p=A p",
    "git --exec-path=. p",
    "git --unheard-of push",
    "git p*",
    "$A push",
    "$(echo git) push",
    "echo git push | sh",
    "bash < file",
    "bash <<< 'git push'",
    "eval $A",
    "sh -c $A",
    "git push'",
    "if git push",
    "xargs git",
    "parallel git ::: push",
    "python3 -c 'x'",
    "perl -lane 'x'",
    "awk 'BEGIN{system(\"x\")}'",
    "sed 's/x/y/e'",
    "vim -c '!x'",
    "make SHELL=x",
    "tar --checkpoint-action=exec=x",
    "git clone ext::x y",
    "find . " + "-exec true \\; " * 41,
]
"""Command lines that may push."""


@pytest.mark.parametrize("text", HIDDEN)
def test_command_is_found_wherever_it_hides(text: str) -> None:
    found = read_command_line(text)
    assert any(fnmatchcase(command, "rm x*") for command in found.commands), found


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("echo a > b", {"b"}),
        ("echo a >> b 2> c", {"b", "c"}),
        ("echo a >| b", {"b"}),
        ("echo a &> b", {"b"}),
        ("a > b; c < d; e > /dev/null 2>&1", {"b"}),
        ("tee -a b c", {"b", "c"}),
        ("cp a b", {"b", "b/a"}),
        ("cp -ut folder x/a", {"folder", "folder/a"}),
        ("cp -rtfolder x/a", {"folder", "folder/a", f"folder/{UNKNOWN}"}),
        ("cp -a a/. .", {".", "./.", UNKNOWN}),
        ("rsync -a a/ b", {"b", "b/a", f"b/{UNKNOWN}"}),
        ("sed -n 'w b' a", {"b"}),
        ("sed -n wb a", {"b"}),
        ("sed 's/a/b/gw c d' a", {"c d"}),
        ("sed '/x/ w b' a", {"b"}),
        ("sed -e 1d -e '$!w b' a", {"b"}),
        ("sed 's/a/new file/' b", set()),
        ("sed -n 1,20p a", set()),
        ("awk '{print > \"b\"}' a", {"b"}),
        ('awk \'END{printf "%s", x >> "b"}\' a', {"b"}),
        ("gawk '{print $1 > $2}' a", {UNKNOWN}),
        ("awk '$3 > 5' a", set()),
        ("find . -fprintf b x", {"b"}),
        ("find . -name x -fls b", {"b"}),
        ("curl -O http://x/b", {"./b"}),
        ("curl -sSLO http://x/b", {"./b"}),
        ("curl -sS http://x/b", set()),
        ("curl -OJ http://x/b", {"./b", UNKNOWN}),
        ("wget -q http://x/b", {"./b"}),
        ("wget -P c http://x/b", {"c", "c/b"}),
        ("tar xzf a", {UNKNOWN}),
        ("tar -x -f a", {UNKNOWN}),
        ("tar -czf b a", {"b"}),
        ("tar tf a", set()),
        ("unzip a", {UNKNOWN}),
        ("git apply a", {UNKNOWN}),
        ("patch -p1 -i a", {UNKNOWN}),
        ("git checkout HEAD -- b", {"HEAD", "b"}),
        ("zip -r b a", {"b"}),
        ("sort -t , -o b a", {"b"}),
        ("shuf -o b a", {"b"}),
        ("sudoedit -u root b", {"b"}),
        ("install -o root -m 644 a b", {"b", "b/a"}),
        ("cp --target-dir folder a", {"folder", "folder/a"}),
        ("cp a .", {".", "./a"}),
        ("ln -s x/a", {".", "./a"}),
        ("curl -sSLo b http://x", {"b"}),
        ("sed -Ei.bak s/a/b/ c", {"c"}),
        ("sed --in-pl s/a/b/ c", {"c"}),
        ("perl -pie s/a/b/ c", {"c"}),
        ("cp x/a y/b folder", {"folder", "folder/a", "folder/b"}),
        ("cp -t folder x/a", {"folder", "folder/a"}),
        ("cp --target-directory=folder a", {"folder", "folder/a"}),
        ("dd if=a of=b bs=1", {"b"}),
        ("sed -i s/a/b/ c", {"c"}),
        ("sed -i -e s/a/b/ c d", {"c", "d"}),
        ("sed s/a/b/ c", set()),
        ("sudo sh -c 'env tee b'", {"b"}),
        ("curl -o b http://x", {"b"}),
        ("sort -ob a", {"b"}),
        ("git -C . diff --output=b", {"b"}),
        ("cat <<E > b\nx\nE", {"b"}),
        ("{ a; } > b", {"b"}),
        ("echo a > $b", {UNKNOWN}),
    ],
)
def test_files_that_a_command_writes_are_found(text: str, paths: set[str]) -> None:
    assert read_command_line(text).writes == paths


def test_files_that_a_command_removes_or_reads_are_found() -> None:
    found = read_command_line("rm -f a; mv b c; cat < d")
    assert (found.changes, found.reads) == ({"a", "b"}, {"d"})


def test_words_behind_a_redirection_belong_to_the_command() -> None:
    for text in ("git >x push", "git 2>&1 push", "true | git </dev/null push", "git <<E push\nE", "git >x 2>y push"):
        assert "git push" in read_command_line(text).commands, text


@pytest.mark.parametrize("text", PUSHES)
def test_subcommand_is_found_behind_options(text: str) -> None:
    found = read_command_line(text)
    assert any(fnmatchcase(command, "git push*") for command in found.commands), found


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("npm pub", "npm publish"),
        ("npm --silent publi", "npm publish"),
        ("npm distTag ls", "npm dist-tag ls"),
        ("npm rb", "npm rebuild"),
        ("git-push origin", "git push origin"),
        ("/usr/lib/git-core/git-push origin", "git push origin"),
        ("docker image push a", "docker push a"),
        ("docker --debug image push a", "docker push a"),
        ("docker image rm a", "docker rmi a"),
        ("docker container rm a", "docker rm a"),
        ("docker buildx --builder a build .", "docker build ."),
        ("podman image push a", "podman push a"),
        ("docker-compose down", "docker compose down"),
        ("make all deploy", "make deploy"),
        ("make -k A=1 deploy", "make deploy"),
        ("make -C a -o b deploy", "make deploy"),
    ],
)
def test_subcommand_is_found_by_its_other_names(text: str, command: str) -> None:
    assert command in read_command_line(text).commands


@pytest.mark.parametrize("text", UNCLEAR_PUSHES)
def test_command_that_cannot_be_known_may_be_any_that_begins_so(text: str) -> None:
    found = read_command_line(text)
    assert found.may_match("git push*") or any(fnmatchcase(command, "git push*") for command in found.commands), found


@pytest.mark.parametrize(
    "text",
    [
        "git status",
        "git log --oneline",
        "echo $HOME",
        "ls *.py",
        'pytest -k "a and b"',
        "cd a && make",
        "grep -rn 'git push' .",
        "npm run build > out.txt 2>&1",
    ],
)
def test_ordinary_command_is_not_taken_for_another(text: str) -> None:
    found = read_command_line(text)
    assert not found.may_match("git push*")
    assert not any(fnmatchcase(command, pattern) for command in found.commands for pattern in ("git push*", "rm *"))


TOO_MUCH = [
    "a" * 1_000_000,
    "echo a; " * 100_000,
    "cat <<E\n" + "x y\n" * 250_000 + "E",
    "'" * 1_000_000,
    '"a" ' * 250_000,
    "|" * 1_000_000,
    "$( " * 10_000,
    "$( " * 10_000 + "rm x" + ")" * 10_000,
    "`" * 10_001,
    "(" * 10_000,
    "( " * 10_000 + "rm x" + ")" * 10_000,
    "<<<" * 6_000,
    "a | " * 4_000,
    "a=( " * 4_000,
    "if " * 6_000,
    "sh -c " * 3_000,
    "eval " * 3_000 + "rm x",
    "a;" * 20_000,
    "'" * 9_999,
    "\x00\x01\ud800",
    "{" * 10_000,
    "{ " * 9_000,
    "! " * 9_000 + "$a",
    "npx " * 2_000 + "rm x",
    "docker exec " * 1_000,
    "docker run a;" * 900 + "$a",
    "sed 's/" + "a/" * 9_000 + "'",
    "ls " + "> x " * 4_000,
    "parallel " * 500 + "$(" * 100,
    "sudo " + "-x " * 6_000 + "rm x",
    "find . " + "-exec find . " * 1_300,
    "[[ " * 6_000,
    " ".join(f"[{n}" for n in range(3_000)) + "$(",
    "\n " * 9_000 + "$a",
]
"""Command lines of which not everything is read."""


@pytest.mark.parametrize("text", TOO_MUCH, ids=lambda text: text[:8].encode(errors="replace").hex())
def test_command_line_that_is_too_much_is_unclear(text: str) -> None:
    found = read_command_line(text)
    assert found.unclear or "rm x" in found.commands


def count_statements(run: Callable[[], object]) -> int:
    """Count the lines of Python that a call runs."""
    count = 0

    def trace(frame: object, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("text", TOO_MUCH[6:], ids=lambda text: text[:8].encode(errors="replace").hex())
def test_command_line_that_is_too_much_is_read_in_few_steps(text: str) -> None:
    get_tables()
    statements = count_statements(lambda: read_command_line.__wrapped__(text))
    assert statements < 30 * 20_000  # a few for each character


@pytest.mark.parametrize("text", [text for text in TOO_MUCH if len(text) > LENGTH_LIMIT or text[:1] in "|<"])
def test_parser_does_not_read_what_may_take_it_long(text: str) -> None:
    before = get_parser.cache_info()
    assert read_command_line.__wrapped__(text).unclear
    read_composition.__wrapped__(text)
    assert get_parser.cache_info() == before


def test_empty_command_line_has_no_commands() -> None:
    assert read_command_line("") == read_command_line(" \n ") == read_command_line("# rm x")
    assert not read_command_line("").commands


def test_tables_are_valid() -> None:
    tables = get_tables()
    assert tables.wrappers["timeout"].operands == 1
    assert tables.subcommands["git"].same["send-pack"] == "push"


PLAIN = st.text("abz09_./:=@,+-", min_size=1, max_size=4)
PIECES = st.one_of(
    PLAIN,
    st.text('ab $`\\"*;&|<>()\n', max_size=4).map(lambda text: f"'{text}'"),
    st.text("ab '*;&|<>()#\n", max_size=4).map(lambda text: f'"{text}"'),
    st.sampled_from(list("ab $`\\\"'*;&|<>()#~!{}[]?")).map(lambda character: f"\\{character}"),
)
WORDS = st.lists(PIECES, min_size=1, max_size=4).map("".join)


@pytest.mark.posix("there is no bash")
@settings(deadline=None)
@given(st.lists(WORDS, min_size=1, max_size=4))
@example(["'pu'\"sh\"", "\\ y"])
@example(["\"pu\"sh'x'\\ y"])
@example(["a\\ b", "c"])
@example(["''\\$"])
@example(["'\\\n'"])
@example(['" "'])
def test_words_are_those_of_bash(words: list[str]) -> None:
    """What is known is what bash makes of it; the rest is unknown."""
    text = " ".join(words)
    ran = subprocess.run(
        ["bash", "-c", f"f() {{ printf '%s\\0' \"$@\"; }}; f say {text}"], capture_output=True, check=True, timeout=60
    )
    said = " ".join(ran.stdout.decode().split("\0")[:-1])
    found = read_command_line(f"say {text}")
    exact = [command for command in found.commands if command == said]
    assert exact or found.unclear, (text, said, found)


def test_unknown_is_no_text_of_a_rule() -> None:
    assert not any(character in "abc*?[]" for character in UNKNOWN)
