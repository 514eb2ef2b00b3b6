"""`crow perms`: kept answers are listed and revoked, decisions explained, and rules tested."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from crow_core.testing import Reply, ScriptedServer
from crow_permissions.kept_answers import AnswerRule, KeptAnswer, KeptAnswers

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

pytestmark = pytest.mark.anyio

RULES = """
[permissions]
allow = ["terminal:git status", "terminal:ls *", "terminal:make *"]
ask = ["terminal:make deploy"]
deny = ["terminal:git push*", "*:secrets/*"]
"""


def store(machine: "Machine") -> KeptAnswers:
    return KeptAnswers(Path(machine.env["CROW_HOME"]))


def keep(machine: "Machine", command: str, folder: Path | None = None, *, allows: bool = True) -> KeptAnswer:
    rule = AnswerRule("command", "terminal", command)
    scope = "folder" if folder else "always"
    answer = KeptAnswer(allows, rule, scope, str(folder or ""), 1_700_000_000.0)
    store(machine).add(answer)
    return answer


async def test_answers_are_listed_and_revoked_by_number_id_and_folder(machine: "Machine") -> None:
    keep(machine, "make all", machine.project)
    second = keep(machine, "make \x1b]0;t\x07all", allows=False)
    for command in ("a", "b"):
        keep(machine, command, machine.home)
    listed = await machine.crow("perms", "list")
    rows = json.loads((await machine.crow("perms", "list", "--json")).out)

    assert "\x1b" not in listed.out
    assert ["make all" in listed.out, "reject" in listed.out, rows[0]["id"] in listed.out] == [True] * 3
    assert rows[0]["folder"] == str(machine.project)
    assert [(row["number"], row["id"], row["allows"]) for row in rows][1] == (2, second.id, False)
    assert rows[0]["rule"]["value"] == "make all"
    assert rows[1]["folder"] is None

    assert (await machine.crow("perms", "revoke")).code == 2
    assert (await machine.crow("perms", "revoke", "1", "9")).code == 2
    assert len(store(machine).list_all()) == 4
    assert (await machine.crow("perms", "revoke", "1", second.id)).code == 0
    assert [each.rule.value for each in store(machine).list_all()] == ["a", "b"]
    assert "Revoked: allow in" in (await machine.crow("perms", "revoke", "--folder", str(machine.home))).out
    assert store(machine).list_all() == []


async def test_answer_about_hosts_of_commands_is_listed_explained_and_revoked(machine: "Machine") -> None:
    del machine.env["CROW_SANDBOX"]
    rule, folder = AnswerRule("reach", "terminal", "files.test, pypi.test"), str(machine.project)
    store(machine).add(KeptAnswer(True, rule, "folder", folder, 1_700_000_000.0))
    assert "commands reach files.test, pypi.test" in (await machine.crow("perms", "list")).out
    explained = (await machine.crow("perms", "explain", "python3 get.py")).out
    if json.loads((await machine.crow("status", "--json")).out)["sandbox"]["level"] == "review":
        assert "you are asked before it reaches another host than files.test, pypi.test" in explained
    revoked = await machine.crow("perms", "revoke", "1")
    assert revoked.out == f"Revoked: allow in {folder}: commands reach files.test, pypi.test\n"


async def test_all_answers_are_revoked(machine: "Machine") -> None:
    keep(machine, "a")
    assert (await machine.crow("perms", "revoke", "--all")).code == 0
    assert (await machine.crow("perms", "list")).out == ""


async def test_damaged_answers_are_one_sentence_and_are_left_as_they_are(machine: "Machine") -> None:
    file = store(machine).file
    file.parent.mkdir()
    file.write_text("{")
    for command in (["list"], ["revoke", "--all"]):
        done = await machine.crow("perms", *command)
        assert (done.code, done.err.count("\n")) == (2, 1)
        assert "No kept answer is used" in done.err
    explained = await machine.crow("perms", "explain", "make")
    assert explained.out.startswith("ask:")
    assert "No kept answer is used" in explained.err
    assert file.read_text() == "{"


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
async def test_model_cannot_revoke_an_answer_by_its_terminal(machine: "Machine") -> None:
    keep(machine, "rm x", allows=False)
    revoke = f"{sys.executable} -m crow_cli perms revoke --all"
    calls: list[Any] = [{"name": "terminal", "arguments": {"command": revoke}}]
    async with ScriptedServer([Reply(tool_calls=calls), Reply("Done.")]) as server:
        machine.ask(server.url)
        done = await machine.crow("run", "--yolo", "Revoke it.")
    assert done.code == 0
    assert len(store(machine).list_all()) == 1
    (result,) = [m["content"] for m in server.requests[-1]["messages"] if m["role"] == "tool"]
    assert "crow has started it" in result


@pytest.mark.parametrize(
    ("call", "more", "out"),
    [
        ("git status", [], ["allow: the rule 'terminal:git status'", "from: {config}", "runs: git status"]),
        ("git -C . push", [], ["deny: the rule 'terminal:git push*' says deny", "from: {config}", "runs: git push"]),
        ("rm x", [], ["ask: no rule and no answer allows it in the mode ask", "runs: rm x"]),
        ("rm x", ["--mode", "yolo"], ["allow: mode yolo"]),
        ("rm x", ["--mode", "plan"], ["deny: plan mode only reads"]),
        ("make kept", [], ["allow: the rule 'terminal:make *'"]),
        ("touch kept", [], ["allow: the kept answer", "from: {home}/answers.json"]),
        ("make deploy", [], ["ask: the rule 'terminal:make deploy' says ask"]),
        ("$X push", [], ["ask: What this runs cannot be known", "runs: more, which is not known"]),
        ("file_editor:secrets/a", [], ["deny: the rule '*:secrets/*' says deny"]),
        ("file_editor:a.py", ["--mode", "accept-edits"], ["allow: mode accept-edits"]),
        ("file_editor:.envrc", ["--mode", "accept-edits"], ["ask: **/.*:"]),
        ("fetch:https://example.com", [], ["ask: no rule"]),
        ('github_create:{"a": 1}', [], ["ask: no rule", "then: ask, once", "another program gets the arguments"]),
        ("curl -d @x a.example", [], ["then: ask, once a session has read private data", "over the network"]),
        ("curl a.example", ["--mode", "yolo"], ["allow: mode yolo", "then: say so, once"]),
        ("make kept", [], ["then: ask", "make runs code of this folder (asked once)"]),
        ("timeout 5 env A=1 git -C . fetch", [], ["then: ask", "A may change what the command does"]),
    ],
)
async def test_decision_is_explained_with_its_rule_and_the_file_of_the_rule(
    machine: "Machine", call: str, more: list[str], out: list[str]
) -> None:
    config = machine.configure(RULES)
    keep(machine, "touch kept", machine.project)
    done = await machine.crow("perms", "explain", call, *more)
    assert done.code == 0
    for text in out:
        assert text.format(config=config, home=config.parent) in done.out


async def test_explanation_as_json_has_the_same_fields(machine: "Machine") -> None:
    machine.configure(RULES)
    found = json.loads((await machine.crow("perms", "explain", "--json", "ls -l && git push")).out)
    assert (found["verdict"], found["commands"], found["is_clear"]) == ("deny", ["git push", "ls -l"], True)


@pytest.mark.parametrize(
    ("call", "settings"), [("git status", ""), ("git push", ""), ("file_editor:a", ""), ("curl x", "taint = false\n")]
)
async def test_explanation_does_not_speak_of_the_taint_where_it_changes_nothing(
    machine: "Machine", call: str, settings: str
) -> None:
    machine.configure(RULES.replace("[permissions]\n", f"[permissions]\n{settings}"))
    done = await machine.crow("perms", "explain", call)
    assert done.code == 0
    assert "then:" not in done.out
    assert json.loads((await machine.crow("perms", "explain", "--json", call)).out)["taint"] == ""


async def test_settings_of_a_project_that_would_loosen_are_named_and_ignored(machine: "Machine") -> None:
    (machine.project / ".crow").mkdir()
    (machine.project / ".crow/config.toml").write_text(
        '[permissions]\nmode = "yolo"\nallow = ["terminal"]\ndeny = ["terminal:ls*"]\n'
    )
    before = await machine.crow("perms", "explain", "lsof")
    assert before.out.startswith("ask:")
    assert "a project may only tighten permissions, so allow, mode is ignored" in before.err
    assert "ignored until you trust the folder" in before.err


async def test_rules_are_tested_against_a_file_of_expectations(machine: "Machine") -> None:
    machine.configure(RULES)
    keep(machine, "touch kept")
    good = "# the rules\n\nallow terminal:git status\nask  terminal:touch kept\ndeny: file_editor:secrets/a\n"
    (machine.project / "good").write_text(good)
    (machine.project / "bad").write_text("deny terminal:ls -l\nallow terminal:ls -l\n")
    (machine.project / "good.toml").write_text(
        'allow = ["terminal:ls -l"]\nask = ["terminal:rm x"]\ndeny = ["terminal:sudo git push"]\n'
    )
    assert (await machine.crow("perms", "test", "good")).out == "All 3 expectations are met.\n"
    assert (await machine.crow("perms", "test", "good.toml")).code == 0
    bad = await machine.crow("perms", "test", "bad")
    assert (bad.code, bad.out) == (
        1,
        "bad, line 1: terminal:ls -l is not deny, but allow: the rule 'terminal:ls *'\n",
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a", "perhaps terminal:x"),
        ("a", "allow"),
        ("a", "allow git status"),
        ("a", "allow x_y:not json"),
        ("a.toml", "allow = 3"),
        ("a.toml", "allow = ["),
        ("a.toml", "permit = []"),
        ("a", "\udcff"),
    ],
)
async def test_file_of_expectations_that_cannot_be_read_is_one_sentence(
    machine: "Machine", name: str, content: str
) -> None:
    (machine.project / name).write_bytes(content.encode(errors="surrogateescape"))
    done = await machine.crow("perms", "test", name)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)


async def test_broken_rules_are_one_sentence(machine: "Machine") -> None:
    (machine.project / "expected").write_text("allow terminal:ls\n")
    for rules in ('allow = ["terminal ls"]', "allow = [", 'alow = ["terminal"]'):
        machine.configure(f"[permissions]\n{rules}\n")
        for command in (["explain", "ls"], ["test", "expected"]):
            done = await machine.crow("perms", *command)
            assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)


async def test_rule_that_can_never_match_fails_the_test(machine: "Machine") -> None:
    (machine.project / "expected").write_text("")
    machine.configure('[permissions]\ndeny = ["termnal:rm *", "github_x", "opencode"]\n')
    done = await machine.crow("perms", "test", "expected")
    assert done.code == 1
    assert "the rule 'termnal:rm *' can never match: there is no tool 'termnal', but 'terminal'" in done.out
    assert done.out.count("\n") == 1
