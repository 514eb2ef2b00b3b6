"""The tools `grep`, `glob` and `tree`."""

import asyncio
import gc
import os
import subprocess
import warnings
from functools import partial

import pytest
from crow_mcp_server import create_server
from crow_mcp_server.files import disk
from crow_mcp_server.search.ripgrep import find_program, list_files
from crow_mcp_server.workspace import Workspace
from fastmcp import Client

pytestmark = pytest.mark.anyio


@pytest.fixture
def project(folder):
    """A project with files in two languages, hidden files and ignored files."""
    for name, text in {
        ".gitignore": "build/\n*.log\n!kept.log\n",
        ".github/ci.yml": "on: needle\n",
        ".git/config": "needle\n",
        "build/out.py": "needle\n",
        "debug.log": "needle\n",
        "kept.log": "needle\n",
        "src/app.py": "import os\n\ndef needle():\n    return 1\n",
        "src/deep/view.ts": "const needle = 1\n",
        "src/deep/view.tsx": "const hay = 1\n",
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture
def search(tools):
    """Runs a search that is expected to succeed."""

    async def call(tool, **arguments):
        result = await tools.call(tool, arguments)
        assert not result.is_error, result.text
        return result

    return call


@pytest.fixture
def refused(tools):
    """Returns the error message of a search that is expected to fail."""

    async def call(tool, **arguments):
        result = await tools.call(tool, arguments)
        assert result.is_error, result.text
        return result.text

    return call


async def test_grep_shows_matches_by_file_without_ignored_files(project, search):
    result = await search("grep", pattern="needle")
    assert result.text == "\n".join(
        [
            *(".github/ci.yml", "1:on: needle"),
            *("kept.log", "1:needle"),
            *("src/app.py", "3:def needle():"),
            *("src/deep/view.ts", "1:const needle = 1"),
        ]
    )
    assert result.data["hits"][2] == {"path": "src/app.py", "line": 3, "text": "def needle():"}
    assert result.data["more"] is False


async def test_grep_searches_an_ignored_folder_that_is_named(project, search):
    assert "build/out.py" in (await search("grep", pattern="needle", path="build")).text


async def test_grep_with_context_marks_matches(project, search):
    result = await search("grep", pattern="needle", path="src/app.py", context=1)
    assert result.text == "src/app.py\n2-\n3:def needle():\n4-    return 1"
    assert [hit.get("near", False) for hit in result.data["hits"]] == [True, False, True]


async def test_grep_lists_only_files_or_counts(project, search):
    (project / "src/app.py").write_text("needle\n\nneedle needle\n")
    files = await search("grep", pattern="needle", path="src", mode="files")
    assert files.text == "src/app.py\nsrc/deep/view.ts"
    counts = await search("grep", pattern="needle", path="src", mode="count")
    assert counts.text == "src/app.py: 2\nsrc/deep/view.ts: 1"
    assert counts.data["hits"][0] == {"path": "src/app.py", "count": 2}


@pytest.mark.parametrize(
    ("only", "files"),
    [
        ({"glob": "*.{ts,tsx}"}, ["src/deep/view.ts"]),
        ({"glob": "src/**"}, ["src/app.py", "src/deep/view.ts"]),
        ({"glob": "src/*"}, ["src/app.py"]),
        ({"glob": "!*.py"}, [".github/ci.yml", "kept.log", "src/deep/view.ts"]),
        ({"glob": "**/*.log"}, ["kept.log"]),
        ({"glob": "build/**"}, []),
        ({"type": "py"}, ["src/app.py"]),
        ({"type": "py", "glob": "*.ts"}, []),
    ],
)
async def test_grep_with_a_glob_does_not_include_ignored_files(project, search, only, files):
    result = await search("grep", pattern="needle", mode="files", **only)
    assert [hit["path"] for hit in result.data["hits"]] == files
    assert files or "Nothing matches" in result.text


async def test_pattern_may_span_lines_and_ignore_case(project, search):
    assert (await search("grep", pattern=r"needle\(\):\n\s+return")).data["hits"][0]["line"] == 3
    assert (await search("grep", pattern="(?i)NEEDLE", path="src")).data["hits"]
    assert (await search("grep", pattern="-> x|--version")).data["hits"] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"pattern": "needle("}, "unclosed group"),
        ({"pattern": "needle\0"}, "cannot search for that: embedded null byte"),
        ({"pattern": "needle\ud800"}, "cannot search for that: 'utf-8'"),
        ({"pattern": "needle" * 500_000}, "cannot search for that: Argument list too long"),
        ({"pattern": "needle", "type": "klingon"}, "unrecognized file type: klingon"),
        ({"pattern": "needle", "glob": "["}, "error parsing glob"),
        ({"pattern": "needle", "path": "gone"}, "does not exist"),
        ({"pattern": "needle", "path": ".."}, "outside of the folders"),
        ({"pattern": "needle", "path": "/etc"}, "outside of the folders"),
        ({"pattern": "needle", "mode": "words"}, "'lines', 'files'"),
    ],
)
async def test_grep_explains_what_is_wrong(project, refused, arguments, said):
    assert said in await refused("grep", **arguments)


async def test_pages_of_matches_are_complete(folder, search):
    for name in range(5):
        (folder / f"{name}.txt").write_text("".join(f"needle {line}\n" for line in range(100)))
    hits, offset = [], 0
    while True:
        result = await search("grep", pattern="needle", offset=offset)
        hits += result.data["hits"]
        offset = len(hits)
        if not result.data["more"]:
            break
        assert result.text.endswith(f"offset {offset} shows more]")
    assert (await search("grep", pattern="needle", offset=900)).text == "[500 results in all]"
    assert [(hit["path"], hit["line"]) for hit in hits] == [(f"{n}.txt", m) for n in range(5) for m in range(1, 101)]


async def test_page_of_long_lines_is_bounded(folder, search):
    (folder / "long").write_text(f"needle{'x' * 1_000_000}\n" * 3)
    (folder / "many").write_text(f"needle{'y' * 390}\n" * 500)
    result = await search("grep", pattern="needle")
    assert len(result.text) < 40_000
    assert "omitted end of long line" in result.text
    assert result.data["more"]


async def test_binary_file_is_not_searched_and_hides_no_other_match(folder, search):
    (folder / "a").write_bytes(b"needle\n" * 20_000 + b"\0\n")
    (folder / "b").write_bytes(b"needle\r\n\xff\xfe needle\n")
    (folder / "c").write_bytes("needle é\n".encode("utf-16"))
    result = await search("grep", pattern="needle", mode="files")
    assert [hit["path"] for hit in result.data["hits"]][-2:] == ["b", "c"]
    assert (await search("grep", pattern="needle$", path="b")).data["hits"][0]["text"] == "needle"
    assert (await search("grep", pattern="needle", path="c")).data["hits"][0]["text"] == "needle é"


async def test_unprintable_names_stay_on_one_line(folder, search):
    (folder / "two\nlines: 1:needle").write_text("needle\n")
    (folder / "--").write_text("needle\n")
    result = await search("grep", pattern="needle")
    assert [hit["path"] for hit in result.data["hits"]] == ["--", "two\ufffdlines: 1:needle"]
    assert len((await search("glob", pattern="*")).text.splitlines()) == 2


async def test_links_are_not_followed_out_of_the_roots(folder, search, refused):
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text("needle\n")
    (folder / "link").symlink_to(outside)
    (folder / "file").symlink_to(outside / "secret.txt")
    assert (await search("grep", pattern="needle")).data["hits"] == []
    assert (await search("glob", pattern="**")).data["files"] == []
    for tool, arguments in (("grep", {"pattern": "needle"}), ("glob", {"pattern": "*"}), ("tree", {})):
        assert "outside of the folders" in await refused(tool, path="link", **arguments)
    assert "outside of the folders" in await refused("grep", pattern="needle", path="file")


async def test_ripgrep_configuration_of_the_user_is_ignored(project, search, monkeypatch):
    (project.parent / "rc").write_text("--invert-match\n")
    monkeypatch.setenv("RIPGREP_CONFIG_PATH", str(project.parent / "rc"))
    assert (await search("grep", pattern="needle", path="kept.log")).text == "kept.log\n1:needle"


async def test_glob_lists_sorted_names_without_ignored_files(project, search):
    assert (await search("glob", pattern="**")).data == {
        "files": [".github/ci.yml", ".gitignore", "kept.log", "src/app.py", "src/deep/view.ts", "src/deep/view.tsx"],
        "total": 6,
    }
    assert (await search("glob", pattern="*.{ts,tsx}")).text == "src/deep/view.ts\nsrc/deep/view.tsx"
    assert (await search("glob", pattern=f"{project}/src/*.py")).text == "src/app.py"
    assert (await search("glob", pattern="*.py", path="src")).text == "src/app.py"
    assert "No file" in (await search("glob", pattern="*.log.gz")).text


async def test_glob_lists_absolute_paths_in_another_root(folder, tools):
    second = folder.parent / "second"
    second.mkdir()
    (second / "a.py").touch()
    roots = [str(folder), str(second)]
    result = await tools.call("glob", {"pattern": "*.py", "path": str(second)}, roots=roots)
    assert result.text == f"{second}/a.py"


async def test_many_files_come_in_pages(folder, search):
    for name in range(450):
        (folder / f"{name:03}.txt").touch()
    first = await search("glob", pattern="*.txt")
    assert first.text.endswith("\n[1-200 of 450; offset 200 shows more]")
    last = await search("glob", pattern="*.txt", offset=400)
    assert last.data == {"files": [f"{name:03}.txt" for name in range(400, 450)], "total": 450}
    beyond = await search("glob", pattern="*.txt", offset=900)
    assert beyond.text == "[there are 450 in all; offset 900 is beyond them]"
    tree = await search("tree", offset=300)
    assert tree.text.splitlines()[1:] == [f"  {name:03}.txt" for name in range(300, 450)]


async def test_tree_counts_files_below_the_shown_depth(project, search):
    assert (await search("tree")).text == "\n".join(
        [
            f"{project}/ (6 files)",
            *("  .github/", "    ci.yml", "  .gitignore", "  kept.log"),
            *("  src/", "    app.py", "    deep/", "      view.ts", "      view.tsx"),
        ]
    )
    shallow = await search("tree", path="src", depth=1)
    assert shallow.text == f"{project}/src/ (3 files)\n  app.py\n  deep/ (2 files)"
    assert shallow.data["files"] == 3


async def test_glob_and_tree_refuse_a_file(project, refused):
    for tool, arguments in (("glob", {"pattern": "*"}), ("tree", {})):
        assert "is a file" in await refused(tool, path="kept.log", **arguments)


@pytest.mark.parametrize(("tool", "processes"), [("grep", 1), ("glob", 2)])
async def test_cancelled_searches_leave_nothing_running(folder, tool, processes):
    os.mkfifo(folder / ".gitignore")  # nothing writes to it, so that rg never ends
    async with Client(create_server()) as client:
        call = partial(client.call_tool_mcp, tool, {"pattern": "x"}, meta={"crow/cwd": str(folder)})
        searches = [asyncio.create_task(call()) for _ in range(8)]
        while len(await asyncio.to_thread(list_searches)) < len(searches) * processes:
            await asyncio.sleep(0.01)
        for each in searches:
            each.cancel()
        await asyncio.gather(*searches, return_exceptions=True)
    assert not list_searches()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rounds", [0, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3, 5, 6, 7))])
def test_event_loop_that_is_closed_while_a_cancelled_search_ends_waits_for_rg(folder, rounds):
    async def cancel_search():
        search = asyncio.create_task(list_files(disk.resolve_path(str(folder), workspace)))
        while len(await asyncio.to_thread(list_searches)) < 1:
            await asyncio.sleep(0.01)
        search.cancel()
        for _ in range(rounds):
            await asyncio.sleep(0)

    os.mkfifo(folder / ".gitignore")
    workspace = Workspace("one", str(folder), (str(folder),))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(cancel_search())  # cancels the search a second time
        gc.collect()
    assert not [str(each.message) for each in caught]
    assert not list_searches()


async def test_refused_glob_leaves_nothing_running(project, refused):
    (project / ".gitignore").unlink()
    os.mkfifo(project / ".gitignore")
    assert "glob" in await refused("glob", pattern="{")
    assert not list_searches()


def list_searches() -> list[str]:
    """Return the command lines of the searches that run."""
    listed = subprocess.run(["ps", "-A", "-o", "ppid=,args="], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.split()[:2] == [str(os.getpid()), find_program()]]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("encoding", "text", "pattern", "shown"),
    [
        ("latin-1", "un café crème\nrien\n", "café", "un café crème"),
        ("latin-1", "un café crème\n", r"caf\w cr.me", "un café crème"),
        ("cp1252", "“naïve” – 5 €\r\n", "naïve” – 5 €$", "“naïve” – 5 €"),
        ("cp1252", "CAFÉ\n", "(?i)café", "CAFÉ"),
        ("koi8_r", "Привет, мир! Как дела сегодня?\n", "мир", "Привет, мир! Как дела сегодня?"),
        ("cp1251", "Привет, мир! Как дела сегодня?\n", "привет(?i)|Привет", "Привет, мир! Как дела сегодня?"),
        ("shift_jis", "これは日本語の文章です。\nとても短いです。\n", "日本語", "これは日本語の文章です。"),
        ("gb18030", "这是一个中文句子。\n我们今天去学校。\n", "中文", "这是一个中文句子。"),
        ("utf-16", "un café crème\n", "café", "un café crème"),
        ("utf-16", "Привет\r\n", "Привет$", "Привет"),
        ("utf-8-sig", "café\n", "^café", "café"),
    ],
)
async def test_grep_finds_text_in_any_encoding(search, folder, encoding, text, pattern, shown):
    (folder / "sub").mkdir()
    (folder / "sub" / "b.txt").write_bytes(text.encode(encoding))
    (folder / "a.txt").write_text(f"{shown}\n")
    (folder / "z.txt").write_text(f"{shown}\n")
    found = await search("grep", pattern=pattern)
    assert [(hit["path"], hit["text"]) for hit in found.data["hits"]] == [
        (name, shown) for name in ("a.txt", "sub/b.txt", "z.txt")
    ]
    alone = await search("grep", pattern=pattern, path="sub/b.txt")
    assert [(hit["path"], hit["text"]) for hit in alone.data["hits"]] == [("sub/b.txt", shown)]
    for mode, result in (("files", {"path": "sub/b.txt"}), ("count", {"path": "sub/b.txt", "count": 1})):
        assert result in (await search("grep", pattern=pattern, mode=mode)).data["hits"]
    limited = await search("grep", pattern=pattern, glob="b.*", type="txt")
    assert [hit["path"] for hit in limited.data["hits"]] == ["sub/b.txt"]
    assert (await search("grep", pattern=pattern, glob="*.py")).data["hits"] == []


async def test_grep_in_other_encodings_leaves_out_ignored_and_binary_files_and_shows_pages(search, folder):
    (folder / ".gitignore").write_text("ignored.txt\n")
    (folder / "ignored.txt").write_bytes(b"caf\xe9\n")
    (folder / "binary.bin").write_bytes(b"caf\xe9\n\0\xff")
    (folder / "mixed").write_bytes(b"caf\xe9\nau lait\n" * 150)
    (folder / "plain").write_text("café\n" * 150)
    first = await search("grep", pattern="café", context=1)
    assert first.data["more"]
    assert first.data["hits"][1] == {"path": "mixed", "line": 2, "text": "au lait", "near": True}
    last = await search("grep", pattern="café", offset=200)
    assert [hit["path"] for hit in last.data["hits"]] == ["plain"] * 100
    assert not last.data["more"]


async def test_grep_with_context_names_each_file(search, folder):
    for name in "abc":
        (folder / name).write_text("needle\nhay\nhay\nneedle\n")
    found = await search("grep", pattern="needle", context=1)
    assert [hit["path"] for hit in found.data["hits"]] == [name for name in "abc" for _ in range(4)]


async def test_grep_shows_the_match_of_a_long_line(search, folder):
    (folder / "a.min.js").write_text(
        f"{'a' * 900}needle{'b' * 900}needle{'c' * 5_000_000}\nneedle{'d' * 900}\n{'é' * 300}needle{'é' * 900}\n"
    )
    (folder / "b.txt").write_bytes(("é" * 900 + "needle" + "é" * 900).encode("latin-1"))
    found = await search("grep", pattern="(?i)NEEDLE", context=1)
    first, second, third, fourth = (hit["text"] for hit in found.data["hits"])
    assert first == f"[…] {'a' * 120}needle{'b' * 200} […]"
    assert second.startswith("needledd")
    assert len(second) < 450
    assert third == f"[…] {'é' * 120}needle{'é' * 200} […]"
    assert fourth == third
    assert len(found.text) < 2_000
