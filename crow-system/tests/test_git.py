"""git in a hostile repository: a rule that allows a git command does not run the repository's programs."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import crow_mcp_server
import pytest
from crow_core.app import Crow
from crow_core.mcp.server import Server
from crow_core.testing import Reply, ScriptedModel, connect
from crow_permissions.extension import permissions
from crow_permissions.kept_answers import AnswerRule, KeptAnswer, KeptAnswers
from crow_system.git import find_foreign_settings

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")]

ALLOW = ["terminal:git *"]


def git(folder: Path, *arguments: str) -> None:
    name = ("-c", "user.name=a", "-c", "user.email=a@b.example", "-c", "protocol.file.allow=always")
    done = subprocess.run(["git", *name, *arguments], cwd=folder, capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def proof(tmp_path: Path) -> Path:
    """The file that exists if a program of the repository ran."""
    return tmp_path / "ran"


def has_run(proof: Path) -> bool:
    return proof.exists()


@pytest.fixture
def program(tmp_path: Path, proof: Path) -> Path:
    path = tmp_path / "program"
    path.write_text(f"#!/bin/sh\ntouch {proof}\ncat\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    (folder / "a.txt").write_text("one\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    git(folder, "commit", "-q", "--allow-empty", "-m", "second")
    (folder / "a.txt").write_text("two\n")
    return folder


def built_in() -> Server:
    return Server(
        "crow", crow_mcp_server.create_server, definitions=crow_mcp_server.tools(), built_in=True, shared=True
    )


async def run(
    command: str,
    folder: Path,
    trusted: bool = False,
    allow: list[str] = ALLOW,
    answers: KeptAnswers | None = None,
    **options: Any,
) -> tuple[str, list[Any]]:
    """Let the model run a command where the user rejects every question; return its result and the questions."""
    use = {"name": "terminal", "arguments": {"command": command, **options}}
    model = ScriptedModel([Reply(tool_calls=[use]), Reply("Done.")])  # type: ignore[list-item]
    crow = Crow(model, servers=[built_in()])
    crow.use(permissions, allow=allow, trusted=lambda folder: trusted, answers=answers)
    async with connect(crow, permit="reject_once") as editor:
        session = await editor.new_session(str(folder))
        await editor.prompt(session.session_id, "go")
    return model.requests[-1]["messages"][-1]["content"], editor.questions


def add_hook(name: str) -> Callable[[Path, Path], None]:
    def change(repository: Path, program: Path) -> None:
        hook = repository / ".git" / "hooks" / name
        hook.parent.mkdir(exist_ok=True)
        shutil.copy(program, hook)

    return change


def set_config(*settings: tuple[str, str], attributes: str = "", tree: bool = True) -> Callable[[Path, Path], None]:
    def change(repository: Path, program: Path) -> None:
        for key, value in settings:
            git(repository, "config", key, value.replace("PROGRAM", str(program)))
        if attributes:
            path = repository / (".gitattributes" if tree else ".git/info/attributes")
            path.parent.mkdir(exist_ok=True)
            path.write_text(attributes)

    return change


def include(key: str) -> Callable[[Path, Path], None]:
    def change(repository: Path, program: Path) -> None:
        (repository / "more").write_text(f'[diff "evil"]\ntextconv = {program}\n')
        (repository / ".gitattributes").write_text("* diff=evil\n")
        git(repository, "config", key, str(repository / "more"))

    return change


def use_worktree_settings(repository: Path, program: Path) -> None:
    git(repository, "config", "extensions.worktreeConfig", "true")
    git(repository, "config", "--worktree", "diff.external", str(program))


def redirect(repository: Path, program: Path) -> None:
    (repository / ".git").rename(repository / "elsewhere")
    (repository / ".git").write_text("gitdir: elsewhere\n")
    git(repository, "config", "diff.external", str(program))


def sign_commit(repository: Path, program: Path) -> None:
    set_config(("gpg.program", "PROGRAM"), ("log.showSignature", "true"))(repository, program)
    raw = subprocess.run(["git", "cat-file", "commit", "HEAD"], cwd=repository, capture_output=True, text=True).stdout
    head, _, body = raw.partition("\n\n")
    signature = "gpgsig -----BEGIN PGP SIGNATURE-----\n \n abc\n -----END PGP SIGNATURE-----"
    signed = subprocess.run(
        ["git", "hash-object", "-t", "commit", "-w", "--stdin"],
        cwd=repository,
        input=f"{head}\n{signature}\n\n{body}",
        capture_output=True,
        text=True,
    ).stdout.strip()
    git(repository, "update-ref", "HEAD", signed)


def add_submodule(key: str) -> Callable[[Path, Path], None]:
    def change(repository: Path, program: Path) -> None:
        inner = repository / "inner"
        inner.mkdir()
        git(inner, "init", "-q")
        (inner / "b.txt").write_text("one\n")
        (inner / ".gitattributes").write_text("* filter=evil\n")
        git(inner, "add", ".")
        git(inner, "commit", "-q", "-m", "first")
        git(repository, "add", "inner")
        git(inner, "config", key, str(program))
        (inner / "b.txt").write_text("two\n")

    return change


FSMONITOR = ("core.fsmonitor", "PROGRAM")
CHANGES: list[tuple[str, Callable[[Path, Path], None], str]] = [
    ("file system monitor", set_config(FSMONITOR), "git status"),
    ("file system monitor of a submodule", add_submodule("core.fsmonitor"), "git status"),
    ("filter of a submodule", add_submodule("filter.evil.clean"), "git status"),
    ("hook of status", add_hook("post-index-change"), "git status"),
    ("hook of commit", add_hook("pre-commit"), "git commit -a -m x"),
    ("message hook", add_hook("commit-msg"), "git commit -a -m x"),
    ("hook of checkout", add_hook("post-checkout"), "git checkout -f"),
    ("hook of references", add_hook("reference-transaction"), "git tag x"),
    ("hooks elsewhere", set_config(("core.hooksPath", "hooks")), "git commit -a -m x"),
    ("pager", set_config(("core.pager", "PROGRAM")), "git log"),
    ("pager of a command", set_config(("pager.log", "PROGRAM")), "git log"),
    ("external diff", set_config(("diff.external", "PROGRAM")), "git diff"),
    ("diff driver", set_config(("diff.evil.command", "PROGRAM"), attributes="* diff=evil\n"), "git diff"),
    ("text conversion", set_config(("diff.evil.textconv", "PROGRAM"), attributes="* diff=evil\n"), "git log -p"),
    (
        "attributes inside .git",
        set_config(("diff.evil.textconv", "PROGRAM"), attributes="* diff=evil\n", tree=False),
        "git show HEAD:a.txt --textconv",
    ),
    ("clean filter", set_config(("filter.Evil.clean", "PROGRAM"), attributes="* filter=Evil\n"), "git status"),
    ("filter process", set_config(("filter.evil.process", "PROGRAM"), attributes="* filter=evil\n"), "git add a.txt"),
    ("smudge filter", set_config(("filter.evil.smudge", "PROGRAM"), attributes="* filter=evil\n"), "git checkout -f"),
    ("filter with dots", set_config(("filter.a.b.clean", "PROGRAM"), attributes="* filter=a.b\n"), "git diff"),
    ("signatures", sign_commit, "git log"),
    ("signing", set_config(("gpg.program", "PROGRAM"), ("commit.gpgSign", "true")), "git commit -a -m x"),
    (
        "signing with ssh",
        set_config(("gpg.format", "ssh"), ("gpg.ssh.program", "PROGRAM"), ("user.signingKey", "/dev/null")),
        "git commit -S -a -m x",
    ),
    (
        "ssh",
        set_config(("core.sshCommand", "PROGRAM"), ("remote.x.url", "ssh://x.example/y")),
        "git fetch x",
    ),
    ("remote helper", set_config(("protocol.ext.allow", "always")), "git ls-remote ext::PROGRAM"),
    ("upload-pack", set_config(("remote.x.uploadpack", "PROGRAM"), ("remote.x.url", ".")), "git fetch x"),
    (
        "rewritten address",
        set_config(("protocol.ext.allow", "always"), ("url.ext::PROGRAM x.insteadOf", "x:")),
        "git fetch x:y",
    ),
    (
        "proxy",
        set_config(("core.gitProxy", "PROGRAM"), ("remote.x.url", "git://127.0.0.1/y")),
        "git fetch x",
    ),
    ("editor", set_config(("core.editor", "PROGRAM")), "git commit -a"),
    ("sequence editor", set_config(("sequence.editor", "PROGRAM")), "git rebase -i --root"),
    ("alias", set_config(("alias.x", "!PROGRAM")), "git x"),
    ("archive", set_config(("tar.evil.command", "PROGRAM")), "git archive --format=evil HEAD"),
    ("trailer", set_config(("trailer.x.command", "PROGRAM")), "git commit -a -m x --trailer x=1"),
    ("merge driver", set_config(("merge.evil.driver", "PROGRAM"), attributes="* merge=evil\n"), "git stash"),
    ("included settings", include("include.path"), "git diff"),
    ("included on a condition", include("includeIf.onbranch:main.path"), "git diff"),
    ("included for a folder", include("includeIf.gitdir:**.path"), "git diff"),
    ("settings of a worktree", use_worktree_settings, "git diff"),
    ("repository elsewhere", redirect, "git diff"),
    ("configured hook", set_config(("hook.evil.command", "PROGRAM"), ("hook.evil.event", "pre-commit")), "git status"),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("change", "command"), [each[1:] for each in CHANGES], ids=[each[0] for each in CHANGES])
@pytest.mark.parametrize("wait", [None, 100])
async def test_allowed_git_command_runs_no_program_of_a_hostile_repository(
    change: Callable[[Path, Path], None],
    command: str,
    wait: int | None,
    repository: Path,
    program: Path,
    proof: Path,
):
    change(repository, program)
    await run(command.replace("PROGRAM", str(program)), repository, wait=wait)
    assert not has_run(proof)


@pytest.mark.parametrize(
    ("change", "command"), [(set_config(FSMONITOR), "git status"), (add_hook("pre-commit"), "git commit -a -m x")]
)
async def test_git_runs_the_programs_of_a_trusted_repository(
    change: Callable[[Path, Path], None], command: str, repository: Path, program: Path, proof: Path
):
    change(repository, program)
    git(repository, "config", "user.name", "a")
    git(repository, "config", "user.email", "a@b.example")
    await run(command, repository, trusted=True)
    assert has_run(proof)


async def test_bare_repository_in_the_folder_is_not_used(repository: Path, program: Path, proof: Path):
    bare = repository / "bare"
    bare.mkdir()
    git(bare, "init", "-q", "--bare")
    git(bare, "config", "core.fsmonitor", str(program))
    git(bare, "config", "core.bare", "false")
    git(bare, "config", "core.worktree", str(bare))
    for command, folder in (("git status", bare), ("git -C bare status", repository)):
        result, _ = await run(command, folder)
        assert not has_run(proof)
        assert "safe.bareRepository" in result or "This was not run" in result


@pytest.mark.parametrize("command", ["git status --short", "git log --oneline", "git diff", "git --no-pager diff"])
async def test_git_runs_without_a_question_in_a_repository_with_usual_settings(command: str, repository: Path):
    git(repository, "remote", "add", "origin", "https://x.example/y.git")
    git(repository, "config", "branch.main.remote", "origin")
    git(repository, "config", "branch.feature/A.b.merge", "refs/heads/x")
    git(repository, "config", "user.email", "a@b.example")
    result, questions = await run(command, repository)
    assert questions == []
    assert "a.txt" in result or "first" in result


async def test_question_names_the_settings_that_may_run_a_program(repository: Path, program: Path):
    set_config(("filter.evil.clean", "PROGRAM"))(repository, program)
    result, (question,) = await run("git status", repository)
    assert question.tool_call.content[0].content.text == (
        "The rule 'terminal:git *' allows this, but the repository is not trusted, and its settings may run programs: "
        "filter.evil.clean."
    )
    assert [option.kind for option in question.options] == ["allow_once", "reject_once"]
    assert result.startswith("This was not run")


@pytest.mark.parametrize("options", ["-C .", "-c core.fsmonitor=x", "--git-dir=x", "--exec-path=.", "--no-pager -C ."])
async def test_options_of_git_itself_are_asked_about(options: str, repository: Path):
    _, questions = await run(f"git {options} status", repository)
    assert len(questions) == 1


@pytest.mark.parametrize(
    ("command", "asked"),
    [
        ("git status && git diff | head -5", False),
        ("git log --oneline | head -3; echo 'a b'", False),
        ("git config diff.external x && git diff", True),
        ("git diff && git -C . status", True),
        ("git diff; tar xf a.tar; git diff", True),
    ],
)
async def test_several_commands_in_a_line_may_not_change_the_settings_that_were_read(
    command: str, asked: bool, repository: Path
):
    allow = [*ALLOW, "terminal:head *", "terminal:echo *", "terminal:tar *"]
    _, questions = await run(command, repository, allow=allow)
    assert bool(questions) == asked


@pytest.mark.parametrize("command", ["git status && git diff | cat", "echo a; git diff 2>&1"])
async def test_git_runs_no_program_of_a_hostile_repository_in_a_longer_line(
    command: str, repository: Path, program: Path, proof: Path
):
    set_config(("diff.external", "PROGRAM"), FSMONITOR)(repository, program)
    _, questions = await run(command, repository, allow=[*ALLOW, "terminal:echo *", "terminal:cat"])
    assert not has_run(proof)
    assert "diff.external" in str(questions[0].tool_call.content)


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("command", ["cd sub && git diff", "cd ./link/../sub && git diff", "cd link/../sub; git diff"])
async def test_git_runs_no_program_of_a_repository_in_the_folder_into_which_a_command_changes(
    command: str, trusted: bool, repository: Path, program: Path, proof: Path
):
    harmless, hostile = repository / "a" / "sub", repository / "sub"
    for folder in (harmless, hostile, repository / "a" / "b"):
        folder.mkdir(parents=True)
    (repository / "link").symlink_to("a/b")
    git(hostile, "init", "-q")
    (hostile / "a.txt").write_text("one\n")
    git(hostile, "add", ".")
    (hostile / "a.txt").write_text("two\n")
    git(hostile, "config", "diff.external", str(program))
    _, questions = await run(command, repository, trusted=trusted)
    assert questions
    assert not has_run(proof)


async def test_answer_for_a_command_line_holds_where_the_shell_goes_only_without_foreign_settings(
    repository: Path, program: Path, proof: Path, tmp_path: Path
):
    command = "cd ./link/../sub && git diff"
    (repository / "a" / "b").mkdir(parents=True)
    (repository / "sub").mkdir()
    (repository / "link").symlink_to("a/b")
    git(repository / "sub", "init", "-q")
    rule = AnswerRule("command", "terminal", command)
    answers = KeptAnswers(tmp_path / "answers.json")
    answers.add(KeptAnswer(True, rule, "folder", str(repository), 1.0))
    for setting, asked in (("", False), ("diff.external", True)):
        if setting:
            git(repository / "sub", "config", setting, str(program))
        _, questions = await run(command, repository, answers=answers)
        assert bool(questions) == asked
    assert not has_run(proof)


async def test_trust_of_a_folder_holds_in_the_folders_below_it(repository: Path, program: Path, proof: Path):
    (repository / "sub").mkdir()
    set_config(FSMONITOR)(repository, program)
    _, questions = await run("cd sub && git status", repository, trusted=True)
    assert not questions
    assert has_run(proof)


@pytest.mark.parametrize(
    "command",
    ["git status", "git diff", "git log -p", "git show", "git diff | head -5", "git status && git log --format=%GS"],
)
async def test_git_that_only_reads_runs_no_program_of_a_hostile_repository(
    command: str, repository: Path, program: Path, proof: Path
):
    set_config(("diff.external", "PROGRAM"), ("gpg.program", "PROGRAM"), FSMONITOR)(repository, program)
    add_hook("post-index-change")(repository, program)
    _, questions = await run(command, repository, allow=[])
    assert not has_run(proof)
    assert len(questions) == 1


async def test_git_that_only_reads_needs_no_rule_in_a_repository_with_usual_settings(
    repository: Path, program: Path, proof: Path
):
    set_config(FSMONITOR)(repository, program)
    add_hook("post-index-change")(repository, program)
    result, questions = await run("git status --short && git log --oneline | head -1", repository, allow=[])
    assert questions == []
    assert "a.txt" in result
    assert not has_run(proof)


async def test_commands_after_an_allowed_one_see_the_usual_environment(repository: Path):
    uses: list[Any] = [
        {"name": "terminal", "arguments": {"command": command}} for command in ("git status", "env | grep GIT_CONFIG")
    ]
    model = ScriptedModel([*(Reply(tool_calls=[use]) for use in uses), Reply("Done.")])
    crow = Crow(model, servers=[built_in()]).use(permissions, allow=ALLOW)
    async with connect(crow) as editor:
        session = await editor.new_session(str(repository))
        await editor.prompt(session.session_id, "go")
    assert "[exit code 1]" in model.requests[-1]["messages"][-1]["content"]


@pytest.mark.parametrize(
    "change",
    [
        "export GIT_DIR=evil/.git GIT_WORK_TREE=evil",
        "export GIT_EXTERNAL_DIFF=PROGRAM",
        "export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=diff.external GIT_CONFIG_VALUE_0=PROGRAM",
        "export GIT_CONFIG_PARAMETERS=\"'diff.external'='PROGRAM'\"",
        "export HOME=$PWD/home",
        "export XDG_CONFIG_HOME=$PWD/home/.config",
        "export GIT_CONFIG_GLOBAL=$PWD/home/.gitconfig",
    ],
)
async def test_variables_that_commands_have_changed_choose_no_repository_and_no_program(
    change: str, repository: Path, program: Path, proof: Path
):
    git(repository, "clone", "-q", ".", "evil")
    git(repository / "evil", "config", "diff.external", str(program))
    (repository / "evil" / "a.txt").write_text("three\n")
    for file in ("home/.gitconfig", "home/.config/git/config"):
        (repository / file).parent.mkdir(parents=True, exist_ok=True)
        git(repository, "config", "--file", file, "diff.external", str(program))
    commands = [change.replace("PROGRAM", str(program)), "git diff"]
    uses: list[Any] = [{"name": "terminal", "arguments": {"command": command}} for command in commands]
    model = ScriptedModel([*(Reply(tool_calls=[use]) for use in uses), Reply("Done.")])
    crow = Crow(model, servers=[built_in()]).use(permissions, allow=ALLOW)
    async with connect(crow, permit="allow_once") as editor:
        session = await editor.new_session(str(repository))
        await editor.prompt(session.session_id, "go")
    assert len(editor.questions) == 2
    assert not has_run(proof)
    assert "two" in model.requests[-1]["messages"][-1]["content"]


def test_settings_of_the_user_are_not_foreign(repository: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "config").write_text('[filter "lfs"]\nclean = git-lfs clean\n[alias]\nx = status\n')
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))
    assert find_foreign_settings(str(repository)) == []
    git(repository, "config", "filter.lfs.clean", "evil")
    assert find_foreign_settings(str(repository)) == ["filter.lfs.clean"]


def test_settings_of_the_user_in_variables_stay(repository: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "user.name")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "me")
    assert find_foreign_settings(str(repository)) == []
