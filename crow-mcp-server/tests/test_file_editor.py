"""The tool `file_editor`."""

import asyncio
import base64
import codecs
import hashlib
import json
import os
import re
import shutil
from contextlib import suppress
from dataclasses import replace

import crow_system as system
import pytest
from crow_mcp_server import create_server
from crow_mcp_server.workspace import local_workspace
from crow_system import held
from fastmcp import Client

pytestmark = pytest.mark.anyio


def texts(result):
    """Return the path of the only file that changed, and its text before and after."""
    [change] = result.changes
    return change["path"], change["old"], change["new"]


async def test_view_numbers_the_lines(tools, folder):
    (folder / "a.txt").write_text("one\ntwo\n")
    result = await tools.edit("view", "a.txt")
    assert result.text == f"{folder}/a.txt (2 lines)\n     1\tone\n     2\ttwo"
    assert result.meta["crow/locations"] == [{"path": f"{folder}/a.txt", "line": 1}]
    assert result.changes == []


async def test_view_range_shows_a_part_and_minus_one_means_the_end(tools, folder):
    (folder / "a.txt").write_text("".join(f"l{n}\n" for n in range(1, 10)))
    part = await tools.edit("view", "a.txt", view_range=[2, 3])
    assert part.text.splitlines()[1:] == ["     2\tl2", "     3\tl3"]
    assert part.meta["crow/locations"][0]["line"] == 2
    end = await tools.edit("view", "a.txt", view_range=[8, -1])
    assert end.text.splitlines()[1:] == ["     8\tl8", "     9\tl9"]
    beyond = await tools.edit("view", "a.txt", view_range=[9, 100])
    assert beyond.text.splitlines()[1:] == ["     9\tl9"]


@pytest.mark.parametrize(
    ("view_range", "shown"), [([-2, -1], [8, 9]), ([-1, -1], [9]), ([-20, -8], [1, 2]), ([7, -2], [7, 8])]
)
async def test_negative_lines_of_a_view_range_count_from_the_end(tools, folder, view_range, shown):
    (folder / "a.txt").write_text("".join(f"l{n}\n" for n in range(1, 10)))
    part = await tools.edit("view", "a.txt", view_range=view_range)
    assert part.text.splitlines()[1:] == [f"     {n}\tl{n}" for n in shown]
    assert part.meta["crow/locations"][0]["line"] == shown[0]


async def test_replace_all_replaces_every_occurrence(tools, folder):
    (folder / "a").write_bytes(b"one two\r\none\r\nthree\r\n")
    assert "give replace_all" in await tools.get_edit_error("str_replace", "a", old_str="one", new_str="1")
    edit = await tools.edit("str_replace", "a", old_str="one", new_str="1\n1", replace_all=True)
    assert (folder / "a").read_bytes() == b"1\r\n1 two\r\n1\r\n1\r\nthree\r\n"
    assert "2 occurrences were replaced." in edit.text
    assert "     4\t1" in edit.text
    await tools.edit("str_replace", "a", old_str="three", new_str="3", replace_all=True)
    await tools.edit("undo_edit", "a")
    await tools.edit("undo_edit", "a")
    assert (folder / "a").read_bytes() == b"one two\r\none\r\nthree\r\n"


async def test_replace_all_can_be_given_for_one_of_several_edits(tools, folder):
    (folder / "a").write_text("aaa b b c\n")
    edits = [{"old_str": "b", "new_str": "d", "replace_all": True}, {"old_str": "c", "new_str": "e"}]
    await tools.edit("str_replace", "a", edits=edits)
    assert (folder / "a").read_text() == "aaa d d e\n"
    await tools.edit("str_replace", "a", edits=[{"old_str": "aa", "new_str": "x"}], replace_all=True)
    assert (folder / "a").read_text() == "xa d d e\n"


async def test_replace_all_leaves_inexact_occurrences_to_the_model(tools, folder):
    (folder / "a").write_text("if  x:\nif   x:\n")
    error = await tools.get_edit_error("str_replace", "a", old_str="if x:", new_str="if y:", replace_all=True)
    assert "occurs 2 times, with other white space" in error
    assert (folder / "a").read_text() == "if  x:\nif   x:\n"


async def test_missing_path_is_answered_with_the_nearest_ones(tools, folder):
    (folder / "src" / "app").mkdir(parents=True)
    (folder / "src" / "app" / "Settings.py").write_text("")
    (folder / "src" / "main.py").write_text("")
    (folder / "lib").mkdir()
    (folder / "lib" / "main.py").write_text("")
    (folder / "node_modules").mkdir()
    (folder / "node_modules" / "main.py").write_text("")
    (folder.parent / "setting.py").write_text("")
    error = await tools.get_edit_error("view", "src/app/setting.py")
    assert error.endswith(f"does not exist. Did you mean {folder}/src/app/Settings.py?")
    error = await tools.get_edit_error("str_replace", "source/main.py", old_str="a", new_str="b")
    assert error.endswith(f"Did you mean {folder}/lib/main.py or {folder}/src/main.py?")
    error = await tools.get_edit_error("view", "lost/src/main.py")
    assert error.endswith(f"Did you mean {folder}/src/main.py or {folder}/lib/main.py?")
    assert "View its folder" in await tools.get_edit_error("view", "xyzzy")
    for tool, arguments in (("grep", {"pattern": "x"}), ("glob", {"pattern": "*"}), ("tree", {})):
        result = await tools.call(tool, arguments | {"path": "src/ap"})
        assert result.is_error
        assert f"Did you mean {folder}/src/app?" in result.text


async def test_paths_outside_of_the_roots_and_behind_links_are_never_suggested(tools, folder):
    (folder.parent / "hidden").mkdir()
    (folder.parent / "hidden" / "secret.txt").write_text("")
    (folder / "link").symlink_to(folder.parent / "hidden")
    for path in ("secret.txt", "lank/secret.txt", "a/b/secret.txt"):
        assert "View its folder" in await tools.get_edit_error("view", path)
    error = await tools.get_edit_error("view", "link/secre.txt")
    assert "open to this tool" in error
    assert "secret" not in error


@pytest.mark.parametrize("wrong", [[0, 1], [4, 2], [10, 11], [-1, -3], [1, -5], [1, 0]])
async def test_view_range_outside_of_the_file_is_refused_with_the_files_lines(tools, folder, wrong):
    (folder / "a.txt").write_text("one\ntwo\nthree\nfour\n")
    assert "whose lines are 1 to 4" in await tools.get_edit_error("view", "a.txt", view_range=wrong)


async def test_long_view_is_cut_with_a_note_on_the_rest(tools, folder):
    (folder / "long.txt").write_text("".join(f"line {n} {'x' * 50}\n" for n in range(1, 3001)))
    text = (await tools.edit("view", "long.txt")).text
    assert len(text) < 31_000
    last = text.splitlines()[-1]
    end, start = map(int, re.fullmatch(r"\[lines 1-(\d+) of 3000; view_range \[(\d+), -1] shows more]", last).groups())
    assert start == end + 1
    following = await tools.edit("view", "long.txt", view_range=[start, -1])
    assert f"line {start} " in following.text
    assert f"line {start - 1} " not in following.text


async def test_one_huge_line_is_cut_with_a_count(tools, folder):
    (folder / "one.json").write_text("x" * 1_000_000)
    text = (await tools.edit("view", "one.json")).text
    assert len(text) < 3_000
    assert "[998,000 of 1,000,000 characters left out]" in text


async def test_view_of_a_folder_goes_two_levels_deep_sorted(tools, folder):
    for name in ("b/inner/deep.txt", "b/file.py", "a.txt", ".git/config", "node_modules/x.js"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (folder / "link").symlink_to("a.txt")
    result = await tools.edit("view", ".")
    assert result.text == "\n".join(
        [f"{folder}/", "  .git/", "  a.txt", "  b/", "    file.py", "    inner/", "  link@", "  node_modules/"]
    )


async def test_view_of_a_crowded_folder_is_bounded_and_counts_the_rest(tools, folder):
    (folder / "many").mkdir()
    for n in range(600):
        (folder / "many" / f"{n:03}").touch()
    inner = (await tools.edit("view", ".")).text
    assert "    049\n    (550 more)" in inner
    assert (await tools.edit("view", "many")).text.endswith("  399\n  (200 more)")


async def test_folder_with_undecodable_names_can_be_viewed(tools, folder):
    try:
        (folder / os.fsdecode(b"bad\xff\nname")).touch()
    except OSError:
        pytest.skip("this file system takes no such name")
    assert "  bad\ufffd\ufffdname" in (await tools.edit("view", ".")).text


async def test_binary_file_is_refused(tools, folder):
    (folder / "x.bin").write_bytes(b"\x7fELF\0\0\1")
    assert "binary file of 7 bytes" in await tools.get_edit_error("view", "x.bin")
    assert "binary" in await tools.get_edit_error("str_replace", "x.bin", old_str="ELF", new_str="x")
    assert (folder / "x.bin").read_bytes() == b"\x7fELF\0\0\1"


async def test_empty_file_is_described_as_empty_and_accepts_an_insert(tools, folder):
    (folder / "e").touch()
    assert "(empty)" in (await tools.edit("view", "e")).text
    await tools.edit("insert", "e", insert_line=0, new_str="x")
    assert (folder / "e").read_text() == "x\n"


async def test_missing_file_is_an_error_that_says_what_to_do(tools):
    assert "does not exist. View its folder" in await tools.get_edit_error("view", "nothing.txt")
    assert "use create" in await tools.get_edit_error("str_replace", "nothing.txt", old_str="a", new_str="b")


async def test_huge_file_is_refused_with_a_hint_at_the_terminal(tools, folder):
    with (folder / "huge").open("wb") as file:
        file.truncate(11 * 1024 * 1024)
    assert "in the terminal" in await tools.get_edit_error("view", "huge")


async def test_pipe_does_not_hang_the_tool(tools, folder):
    os.mkfifo(folder / "pipe")
    assert "not a file" in await tools.get_edit_error("view", "pipe")


@pytest.mark.parametrize(
    "before",
    [
        "plain é\n".encode(),
        b"",
        codecs.BOM_UTF8 + "one é\r\n".encode(),
        codecs.BOM_UTF16_LE + "one é\n".encode("utf-16-le"),
        codecs.BOM_UTF16_BE + "one é\n".encode("utf-16-be"),
        codecs.BOM_UTF32_LE + "one é\n".encode("utf-32-le"),
        "latin é\n".encode("latin-1"),
        "\u201cquoted\u201d\n".encode("cp1252"),
    ],
)
async def test_change_has_the_exact_bytes_before_and_the_digest_after(tools, folder, before):
    path = folder / "a.txt"
    path.write_bytes(before)
    await tools.edit("view", path)
    [change] = (await tools.edit("create", path, file_text="two\n")).changes
    text = ("\ufeff" if change.get("mark") else "") + change["old"]
    assert text.encode(change.get("encoding", "utf-8")) == before
    assert change["before"] == hashlib.sha256(before).hexdigest()
    assert change["after"] == hashlib.sha256(path.read_bytes()).hexdigest()
    [undone] = (await tools.edit("undo_edit", path)).changes
    assert (undone["before"], undone["after"]) == (change["after"], change["before"])
    assert path.read_bytes() == before


async def test_change_of_a_created_or_removed_file_has_null(tools, folder):
    [made] = (await tools.edit("create", "a.txt", file_text="one\n")).changes
    digest = hashlib.sha256(b"one\n").hexdigest()
    assert made == {"path": f"{folder}/a.txt", "old": None, "new": "one\n", "before": None, "after": digest}
    [removed] = (await tools.edit("undo_edit", "a.txt")).changes
    assert removed == {"path": f"{folder}/a.txt", "old": "one\n", "new": None, "before": digest, "after": None}


async def test_create_makes_parents_and_reports_the_change(tools, folder):
    result = await tools.edit("create", "new/deep/a.txt", file_text="hé\n")
    path = folder / "new/deep/a.txt"
    assert path.read_text() == "hé\n"
    assert texts(result) == (str(path), None, "hé\n")
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


async def test_create_refuses_to_overwrite_a_file_that_was_not_viewed(tools, folder):
    (folder / "a.txt").write_text("precious")
    assert "View it first" in await tools.get_edit_error("create", "a.txt", file_text="x")
    assert (folder / "a.txt").read_text() == "precious"
    other = await tools.call("file_editor", {"command": "view", "path": "a.txt"}, session="other")
    assert not other.is_error
    await tools.get_edit_error("create", "a.txt", file_text="x")
    await tools.edit("view", "a.txt")
    result = await tools.edit("create", "a.txt", file_text="x")
    assert texts(result) == (str(folder / "a.txt"), "precious", "x")


async def test_create_overwrites_a_file_that_it_wrote_itself(tools, folder):
    await tools.edit("create", "a.txt", file_text="1")
    await tools.edit("create", "a.txt", file_text="2")
    assert (folder / "a.txt").read_text() == "2"
    assert (await tools.edit("create", "a.txt", file_text="2")).changes == []


async def test_create_over_a_folder_is_refused(tools, folder):
    (folder / "sub").mkdir()
    assert "Is a directory" in await tools.get_edit_error("create", "sub", file_text="x")


async def test_overwriting_keeps_line_endings_and_byte_order_mark(tools, folder):
    (folder / "a.txt").write_bytes(codecs.BOM_UTF8 + b"a\r\nb\r\n")
    assert "2 lines, CRLF, byte order mark" in (await tools.edit("view", "a.txt")).text
    await tools.edit("create", "a.txt", file_text="c\nd\n")
    assert (folder / "a.txt").read_bytes() == codecs.BOM_UTF8 + b"c\r\nd\r\n"


async def test_str_replace_changes_the_only_match_and_shows_it(tools, folder):
    (folder / "a.py").write_text("".join(f"line{n}\n" for n in range(1, 21)))
    result = await tools.edit("str_replace", "a.py", old_str="line10\n", new_str="new\nlines\n")
    shown = result.text.splitlines()
    assert shown[0] == f"Edited {folder}/a.py:"
    assert shown[1] == "     6\tline6"
    assert "    10\tnew" in shown
    assert shown[-1] == "    15\tline14"
    assert result.meta["crow/locations"] == [{"path": f"{folder}/a.py", "line": 10}]
    [change] = result.changes
    assert change["new"] == (folder / "a.py").read_text() == change["old"].replace("line10", "new\nlines")


async def test_str_replace_without_new_str_deletes(tools, folder):
    (folder / "a").write_text("keep drop keep2")
    await tools.edit("str_replace", "a", old_str=" drop")
    assert (folder / "a").read_text() == "keep keep2"


async def test_str_replace_takes_new_str_literally(tools, folder):
    (folder / "a").write_text("x = .*\n")
    await tools.edit("str_replace", "a", old_str=".*", new_str=r"\1\g<0>{{7*7}}%s")
    assert (folder / "a").read_text() == "x = \\1\\g<0>{{7*7}}%s\n"


async def test_ambiguous_old_str_is_refused_with_the_line_of_every_match(tools, folder):
    (folder / "a").write_text("x\ny\nx\nz\nx\n")
    assert "3 times in" in (text := await tools.get_edit_error("str_replace", "a", old_str="x", new_str="w"))
    assert "at lines 1, 3, 5" in text
    assert (folder / "a").read_text() == "x\ny\nx\nz\nx\n"


async def test_overlapping_matches_are_ambiguous(tools, folder):
    (folder / "a").write_text("aaa")
    assert "2 times" in await tools.get_edit_error("str_replace", "a", old_str="aa", new_str="b")


@pytest.mark.parametrize("blank", ["", " ", "\n", "\t\r\n "])
async def test_blank_old_str_is_refused(tools, folder, blank):
    (folder / "a").write_text("a b\n")
    assert "blank" in await tools.get_edit_error("str_replace", "a", old_str=blank, new_str="x")
    assert (folder / "a").read_text() == "a b\n"


async def test_equal_old_and_new_are_refused(tools, folder):
    (folder / "a").write_text("a b\n")
    assert "nothing to change" in await tools.get_edit_error("str_replace", "a", old_str="a", new_str="a")


async def test_miss_shows_the_closest_lines_with_their_numbers(tools, folder):
    (folder / "a.py").write_text("import os\n\n\ndef compute_total(items):\n    return sum(items)\n")
    text = await tools.get_edit_error("str_replace", "a.py", old_str="def compute_totals(item):\n    return sum(item)")
    assert "closest lines" in text
    assert "     4\tdef compute_total(items):\n     5\t    return sum(items)" in text


@pytest.mark.parametrize(
    ("before", "old", "new", "after", "how"),
    [
        ("if x:\n\treturn  1\n", "if x:\n    return 1", "if y:\n    return 2", "if y:\n\treturn 2\n", "white space"),
        ("a:\n    b = 1\n    c = 2\n", "b = 1\nc = 2\n", "b = 3\n", "a:\n    b = 3\n", "white space"),
        ("a:\n  b = 1\n  c\n", "b = 1\nc", "if b:\n  c = 2", "a:\n  if b:\n    c = 2\n", "white space"),
        ("a = 1   \nb = 2\n", "a = 1\nb = 2", "a = 3\nb = 2", "a = 3\nb = 2\n", "white space"),
        ("say “hello” – it’s late\n", '"hello" - it\'s', "'bye' - it's", "say 'bye' - it's late\n", "quotes"),
        ('print("a")\nprint("b")\n', r"print(\"a\")\nprint(\"b\")", r"print(\"c\")", 'print("c")\n', "escapes"),
    ],
)
async def test_fuzzy_match_is_replaced_with_a_note(tools, folder, before, old, new, after, how):
    (folder / "a").write_text(before)
    result = await tools.edit("str_replace", "a", old_str=old, new_str=new)
    assert (folder / "a").read_text() == after
    assert re.search(f"old_str was found with.*{how}.* at line \\d, and nowhere else", result.text)


async def test_several_fuzzy_matches_are_refused(tools, folder):
    (folder / "a").write_text("\tx = 1\n        x = 1\n")
    text = await tools.get_edit_error("str_replace", "a", old_str="x =  1", new_str="x = 2")
    assert "2 times, with other white space, in" in text
    assert "at lines 1, 2" in text


async def test_new_text_with_ambiguous_indentation_is_refused(tools, folder):
    (folder / "a").write_text("if a:\n\tb\n")
    text = await tools.get_edit_error("str_replace", "a", old_str="if a:\n    b", new_str="if a:\n      b\n        c")
    assert "not found" in text
    assert (folder / "a").read_text() == "if a:\n\tb\n"


async def test_old_text_with_one_indentation_for_several_is_refused(tools, folder):
    """The new line could be indented like either of the lines that it replaces."""
    (folder / "a").write_text("if a:\n    b\n")
    assert "not found" in await tools.get_edit_error("str_replace", "a", old_str="if a:\nb", new_str="c")
    assert (folder / "a").read_text() == "if a:\n    b\n"


async def test_miss_shows_a_diff_to_the_closest_lines(tools, folder):
    (folder / "a.py").write_text("import os\n\ndef compute_total(items):\n    return sum(items)\n")
    text = await tools.get_edit_error("str_replace", "a.py", old_str="def compute_total(items):\n    return max(items)")
    assert text.endswith("(+):\n def compute_total(items):\n-    return max(items)\n+    return sum(items)")


async def test_several_edits_are_made_one_after_the_other(tools, folder):
    (folder / "a").write_bytes(b"one\r\ntwo\r\nthree\r\n")
    edits = [{"old_str": "one", "new_str": "1"}, {"old_str": "1\ntwo", "new_str": "1\n2"}]
    result = await tools.edit("str_replace", "a", edits=edits)
    assert (folder / "a").read_bytes() == b"1\r\n2\r\nthree\r\n"
    assert result.data["diff"] == "@@ -1,3 +1,3 @@\n-one\n-two\n+1\n+2\n three\n"
    await tools.edit("undo_edit", "a")
    assert (folder / "a").read_bytes() == b"one\r\ntwo\r\nthree\r\n"


async def test_one_failing_edit_prevents_all_of_them(tools, folder):
    (folder / "a").write_text("one\ntwo\n")
    edits = [{"old_str": "one", "new_str": "1"}, {"old_str": "gone", "new_str": "2"}]
    assert "Edit 2 of 2 failed, so none was made: " in await tools.get_edit_error("str_replace", "a", edits=edits)
    assert (folder / "a").read_text() == "one\ntwo\n"
    assert "empty" in await tools.get_edit_error("str_replace", "a", edits=[])
    assert "either" in await tools.get_edit_error("str_replace", "a", old_str="one", new_str="1", edits=edits[:1])
    assert "old_str" in await tools.get_edit_error("str_replace", "a", edits=[{"new_str": "x"}])


async def test_diff_is_that_of_the_file_and_has_its_line_numbers(tools, folder):
    lines = [f"line {n}\n" for n in range(1, 2001)]
    (folder / "a").write_text("".join(lines).removesuffix("\n"))
    result = await tools.edit("str_replace", "a", old_str="line 1000\n", new_str="")
    assert result.data["diff"].splitlines()[0] == "@@ -997,7 +997,6 @@"
    assert "-line 1000\n" in result.data["diff"]
    last = await tools.edit("insert", "a", insert_line=1999, new_str="end")
    assert last.data["diff"].endswith(
        "-line 2000\n\\ No newline at end of file\n+line 2000\n+end\n\\ No newline at end of file\n"
    )
    made = await tools.edit("create", "b", file_text="x\n")
    assert made.data["diff"] == "@@ -0,0 +1 @@\n+x\n"


async def test_diff_of_a_rewritten_file_is_bounded(tools, folder):
    (folder / "a").write_text("".join(f"old {n}\n" for n in range(20_000)))
    await tools.edit("view", "a")
    result = await tools.edit("create", "a", file_text="".join(f"new {n}\n" for n in range(20_000)))
    assert len(result.data["diff"]) < 200


async def test_structured_result_agrees_with_the_text(tools, folder):
    (folder / "a").write_text("one\n")
    viewed = await tools.edit("view", "a")
    assert viewed.data == {"path": f"{folder}/a", "line": 1, "text": viewed.text}
    dry = await tools.edit("str_replace", "a", old_str="one", new_str="two", dry_run=True)
    assert (dry.data["diff"], dry.data["dry_run"]) == ("@@ -1 +1 @@\n-one\n+two\n", True)
    assert dry.changes == [], "a log of changes must not have it"
    assert (folder / "a").read_text() == "one\n"


async def test_text_that_would_make_the_file_binary_is_refused(tools, folder):
    (folder / "a").write_text("one\n")
    assert "not be text" in await tools.get_edit_error("str_replace", "a", old_str="one", new_str="t\0o")
    assert "not be text" in await tools.get_edit_error("create", "b", file_text="\0")
    assert os.listdir(folder) == ["a"]


PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de"
    "0000000c4944415408d763f8cfc0000003010100c9fe92ef0000000049454e44ae426082"
)


@pytest.mark.parametrize(
    ("data", "kind"),
    [(PNG, "png"), (b"\xff\xd8\xff\xe0", "jpeg"), (b"GIF89a\0", "gif"), (b"RIFF\0\0\0\0WEBPV", "webp")],
)
async def test_image_is_shown_as_an_image(tools, folder, data, kind):
    (folder / "picture").write_bytes(data)
    result = await tools.client.call_tool_mcp(
        "file_editor", {"command": "view", "path": "picture"}, meta={"crow/cwd": str(folder)}
    )
    text, image = result.content
    assert text.text == f"{folder}/picture ({kind}, {len(data)} bytes)"
    assert (image.mime_type, base64.b64decode(image.data)) == (f"image/{kind}", data)


async def test_image_too_large_for_a_model_is_refused(tools, folder):
    (folder / "big.png").write_bytes(PNG + bytes(6_000_000))
    assert "smaller copy" in await tools.get_edit_error("view", "big.png")


def pdf(*pages: str) -> bytes:
    """Return a small PDF with a line of text on each page."""
    kids = " ".join(f"{2 * n + 4} 0 R" for n in range(len(pages)))
    objects = [
        "<</Type/Catalog/Pages 2 0 R>>",
        f"<</Type/Pages/Kids[{kids}]/Count {len(pages)}>>",
        "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    for n, text in enumerate(pages):
        stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET"
        font = "/Resources<</Font<</F1 3 0 R>>>>"
        objects.append(f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents {2 * n + 5} 0 R{font}>>")
        objects.append(f"<</Length {len(stream)}>>stream\n{stream}\nendstream")
    said, offsets = "%PDF-1.4\n", []
    for number, text in enumerate(objects, 1):
        offsets.append(len(said))
        said += f"{number} 0 obj{text}endobj\n"
    rows = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    size = len(objects) + 1
    table = (
        f"xref\n0 {size}\n0000000000 65535 f \n{rows}trailer<</Size {size}/Root 1 0 R>>\nstartxref\n{len(said)}\n%%EOF"
    )
    return (said + table).encode()


async def test_text_of_a_pdf_is_shown_page_by_page(tools, folder):
    (folder / "paper.pdf").write_bytes(pdf("First page", "Second page"))
    result = await tools.edit("view", "paper.pdf")
    assert result.text == "\n".join(
        [
            f"{folder}/paper.pdf (the text of a PDF)",
            *("     1\t[page 1 of 2]", "     2\tFirst page", "     3\t"),
            *("     4\t[page 2 of 2]", "     5\tSecond page"),
        ]
    )
    part = await tools.edit("view", "paper.pdf", view_range=[5, 5])
    assert part.text.endswith("\n     5\tSecond page")


async def test_handwritten_pdf_without_fonts_is_shown_as_source(tools, folder):
    (folder / "a.pdf").write_bytes(pdf("Timetable").replace(b"/Resources", b"/Resourced"))
    assert "(Timetable) Tj" in (await tools.edit("view", "a.pdf")).text


@pytest.mark.parametrize("data", [b"%PDF-1.4\n", b"%PDF-1.4\n%%EOF", pdf("x").replace(b"/Pages 2", b"/Pages 9")])
async def test_broken_pdf_is_refused_in_one_line(tools, folder, data):
    (folder / "broken.pdf").write_bytes(data)
    text = await tools.get_edit_error("view", "broken.pdf")
    assert "cannot be read" in text
    assert "pdftotext" in text


async def test_notebook_is_shown_cell_by_cell_and_edited_as_json(tools, folder):
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": ["# Title\n", "words"]},
        {
            "cell_type": "code",
            "metadata": {},
            "execution_count": 1,
            "source": "print(6 * 7)",
            "outputs": [
                {"output_type": "stream", "name": "stdout", "text": ["42\n"]},
                {
                    "output_type": "display_data",
                    "metadata": {},
                    "data": {"image/png": "AAAA", "text/plain": "<Figure>"},
                },
            ],
        },
    ]
    (folder / "a.ipynb").write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    result = await tools.edit("view", "a.ipynb")
    assert [line.partition("\t")[2] for line in result.text.splitlines()[1:]] == [
        *("# %% cell 1, markdown", "# Title", "words"),
        *("# %% cell 2, code", "print(6 * 7)", "# > 42", "# > <Figure>", "# > (image/png)"),
    ]
    await tools.edit("str_replace", "a.ipynb", old_str="print(6 * 7)", new_str="print(42)")
    assert json.loads((folder / "a.ipynb").read_text())["cells"][1]["source"] == "print(42)"
    (folder / "b.ipynb").write_text("no notebook\n")
    assert "     1\tno notebook" in (await tools.edit("view", "b.ipynb")).text


async def test_undo_survives_the_end_of_the_server(folder, tmp_path):
    async def call(session="one", **arguments):
        async with Client(create_server(state=tmp_path / "state")) as client:
            meta = {"crow/session": session, "crow/cwd": str(folder)}
            return await client.call_tool_mcp("file_editor", arguments, meta=meta)

    path = folder / "a"
    before = codecs.BOM_UTF16_LE + "secret é\r\n".encode("utf-16-le")
    path.write_bytes(before)
    assert not (await call(command="str_replace", path="a", old_str="secret", new_str="open")).is_error
    assert not (await call(command="insert", path="a", insert_line=0, new_str="top")).is_error
    assert (await call("two", command="undo_edit", path="a")).is_error
    for _ in range(2):
        assert not (await call(command="undo_edit", path="a")).is_error
    assert path.read_bytes() == before
    assert (await call(command="undo_edit", path="a")).is_error
    assert not (await call(command="create", path="b", file_text="x")).is_error
    kept = [tmp_path / "state", *(tmp_path / "state").rglob("*")]
    assert {file.stat().st_mode & 0o777 for file in kept if file.is_file()} == {0o600}
    assert {file.stat().st_mode & 0o077 for file in kept if file.is_dir() and file != kept[0]} == {0}
    for file in kept[1:]:
        if file.is_file():
            file.write_text("{")
    assert (await call(command="undo_edit", path="b")).is_error


async def test_host_that_stores_changes_passes_them_to_a_new_server(folder, tmp_path):
    path, kept = folder / "a", []

    def workspace(meta):
        return replace(local_workspace(meta), changes=lambda: kept)

    async def call(**arguments):
        """Call the tool on a new server."""
        async with Client(create_server(workspace, state=tmp_path / "state")) as client:
            answer = await client.call_tool_mcp("file_editor", arguments, meta={"crow/cwd": str(folder)})
            kept.extend((answer.meta or {}).get("crow/changes", []))
            return answer

    await call(command="create", path="a", file_text="one\n")
    path.write_bytes(texts := codecs.BOM_UTF16_LE + "one é\r\n".encode("utf-16-le"))
    await call(command="str_replace", path="a", old_str="one", new_str="two")
    await call(command="insert", path="a", insert_line=0, new_str="top")
    await call(command="undo_edit", path="a")
    await call(command="insert", path="a", insert_line=0, new_str="TOP")
    for _ in range(2):
        assert not (await call(command="undo_edit", path="a")).is_error
    assert path.read_bytes() == texts
    assert "changed after your last edit" in (await call(command="undo_edit", path="a")).content[0].text
    path.write_bytes(b"one\n")
    assert "the file is gone" in (await call(command="undo_edit", path="a")).content[0].text
    assert "no edit" in (await call(command="undo_edit", path="a")).content[0].text
    assert not (tmp_path / "state").exists()


async def test_change_that_was_stored_masked_cannot_be_undone(folder):
    kept = []
    meta = {"crow/cwd": str(folder)}

    def workspace(meta):
        return replace(local_workspace(meta), changes=lambda: kept)

    (folder / "a").write_text("key = hunter2\n")
    async with Client(create_server(workspace)) as client:
        edit = {"command": "str_replace", "path": "a", "old_str": "hunter2", "new_str": "x"}
        [change] = (await client.call_tool_mcp("file_editor", edit, meta=meta)).meta["crow/changes"]
    kept.append(change | {"old": "key = ***\n"})
    async with Client(create_server(workspace)) as client:
        undone = await client.call_tool_mcp("file_editor", {"command": "undo_edit", "path": "a"}, meta=meta)
    assert undone.is_error
    assert (folder / "a").read_text() == "key = x\n"


async def test_miss_because_of_line_numbers_is_explained(tools, folder):
    (folder / "a.py").write_text("one\ntwo\n")
    assert "leave them out" in await tools.get_edit_error("str_replace", "a.py", old_str="     2\ttwo", new_str="x")


async def test_miss_because_the_edit_was_made_already_is_explained(tools, folder):
    (folder / "a.py").write_text("one\nnew text\n")
    text = await tools.get_edit_error("str_replace", "a.py", old_str="old text", new_str="new text")
    assert "new_str is there, at line 2: perhaps this edit was made already" in text
    assert "closest lines are:\n     2\tnew text" in text


async def test_crlf_file_is_edited_with_line_feeds_and_stays_crlf(tools, folder):
    (folder / "a").write_bytes(b"a\r\nb\r\nc\r\n")
    await tools.edit("str_replace", "a", old_str="a\nb\n", new_str="1\n2\n3\n")
    assert (folder / "a").read_bytes() == b"1\r\n2\r\n3\r\nc\r\n"
    await tools.edit("insert", "a", insert_line=1, new_str="x\ny")
    assert (folder / "a").read_bytes() == b"1\r\nx\r\ny\r\n2\r\n3\r\nc\r\n"


async def test_mixed_line_endings_outside_of_the_match_stay(tools, folder):
    (folder / "a").write_bytes(b"a\r\nb\nc\r\nd\n")
    await tools.edit("str_replace", "a", old_str="b\nc", new_str="B\nC")
    assert (folder / "a").read_bytes() == b"a\r\nB\nC\r\nd\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (codecs.BOM_UTF8 + b"caf\xc3\xa9\n", codecs.BOM_UTF8 + b"th\xc3\xa9\n"),
        (codecs.BOM_UTF16_LE + "café\n".encode("utf-16-le"), codecs.BOM_UTF16_LE + "thé\n".encode("utf-16-le")),
        (codecs.BOM_UTF16_BE + "café\r\n".encode("utf-16-be"), codecs.BOM_UTF16_BE + "thé\r\n".encode("utf-16-be")),
        (codecs.BOM_UTF32_LE + "café".encode("utf-32-le"), codecs.BOM_UTF32_LE + "thé".encode("utf-32-le")),
        (b"caf\xe9 \xfc\n", b"th\xe9 \xfc\n"),
        (b"caf\xe9 \x93quoted\x94", b"th\xe9 \x93quoted\x94"),
    ],
)
async def test_encoding_and_byte_order_mark_stay(tools, folder, before, after):
    (folder / "a").write_bytes(before)
    assert "café" in (await tools.edit("view", "a")).text
    await tools.edit("str_replace", "a", old_str="café", new_str="thé")
    assert (folder / "a").read_bytes() == after


@pytest.mark.parametrize(
    ("encoding", "word", "other", "rest"),
    [
        ("cp1251", "Привет", "Здравствуй", "мир! Это тестовая строка"),
        ("koi8_r", "Привет", "Здравствуй", "мир! Это тестовая строка"),
        ("gb18030", "你好", "再见", "世界！这是一个测试文件。"),
        ("big5", "你好", "再見", "世界！這是一個測試檔案。"),
        ("cp932", "こんにちは", "さようなら", "世界。これはテストです。"),
        ("euc_jp", "こんにちは", "さようなら", "世界。これはテストです。"),
        ("cp949", "안녕하세요", "안녕히", "세계! 이것은 테스트 파일입니다."),
        ("cp1253", "Καλημέρα", "Αντίο", "κόσμε, αυτό είναι ένα τεστ"),
    ],
)
async def test_non_western_text_is_read_and_written_in_its_encoding(tools, folder, encoding, word, other, rest):
    text = f"import os\n\n# {word}, {rest}\n" + "x = 1\n" * 2_000
    (folder / "a").write_bytes(text.encode(encoding))
    viewed = (await tools.edit("view", "a", view_range=[3, 3])).text
    assert viewed == f"{folder}/a (2003 lines, {encoding})\n     3\t# {word}, {rest}"
    await tools.edit("str_replace", "a", old_str=word, new_str=other)
    assert (folder / "a").read_bytes() == text.replace(word, other).encode(encoding)
    await tools.edit("undo_edit", "a")
    assert (folder / "a").read_bytes() == text.encode(encoding)


@pytest.mark.parametrize(
    "text",
    ["[a-zäöüß]+ # Größe", "20 °C ± 0.5\n" * 9, "Ça coûte 5 £, voilà «déjà»", "¿Qué? ¡Olé!", "É" * 3, "·" * 30],
)
async def test_text_that_may_be_western_is_read_as_western(tools, folder, text):
    (folder / "a").write_bytes(text.encode("latin-1"))
    assert text.splitlines()[0] in (await tools.edit("view", "a")).text


async def test_character_that_the_encoding_lacks_is_refused(tools, folder):
    (folder / "a").write_bytes(b"caf\xe9\n")
    assert "latin-1, which has no '→'" in await tools.get_edit_error("str_replace", "a", old_str="caf", new_str="→")
    assert (folder / "a").read_bytes() == b"caf\xe9\n"
    (folder / "b").write_bytes(b"\x93caf\xe9\x94\n")
    assert "cp1252, which has no '→'" in await tools.get_edit_error("str_replace", "b", old_str="caf", new_str="→")


async def test_missing_final_newline_stays_missing(tools, folder):
    (folder / "a").write_text("one\ntwo")
    await tools.edit("str_replace", "a", old_str="two", new_str="2")
    await tools.edit("insert", "a", insert_line=2, new_str="three\n")
    assert (folder / "a").read_text() == "one\n2\nthree"


async def test_insert_goes_to_the_top_the_middle_and_the_end(tools, folder):
    (folder / "a").write_text("one\n")
    await tools.edit("insert", "a", insert_line=0, new_str="top")
    await tools.edit("insert", "a", insert_line=2, new_str="end\n")
    result = await tools.edit("insert", "a", insert_line=1, new_str="mid")
    assert (folder / "a").read_text() == "top\nmid\none\nend\n"
    assert result.meta["crow/locations"][0]["line"] == 2


async def test_insert_of_an_empty_string_is_a_blank_line(tools, folder):
    (folder / "a").write_text("one\ntwo\n")
    await tools.edit("insert", "a", insert_line=1, new_str="")
    assert (folder / "a").read_text() == "one\n\ntwo\n"


async def test_insert_beyond_the_end_names_the_last_line(tools, folder):
    (folder / "a").write_text("one\n")
    assert "from 0 (the top) to 1" in await tools.get_edit_error("insert", "a", insert_line=2, new_str="x")
    assert "from 0 (the top) to 1" in await tools.get_edit_error("insert", "a", insert_line=-1, new_str="x")


async def test_missing_argument_is_named(tools, folder):
    (folder / "a").write_text("one\n")
    assert "needs file_text" in await tools.get_edit_error("create", "b")
    assert "needs old_str" in await tools.get_edit_error("str_replace", "a")
    assert "needs insert_line" in await tools.get_edit_error("insert", "a", new_str="x")
    assert "needs new_str" in await tools.get_edit_error("insert", "a", insert_line=0)


async def test_wrong_arguments_are_reported_in_one_line(tools):
    text = await tools.get_edit_error("destroy", "a")
    assert "'view', 'create'" in text
    assert "pydantic" not in text
    assert "\n" not in text
    (tools.folder / "a").write_text("one\n")
    assert "view_range" in await tools.get_edit_error("view", "a", view_range=[1])
    assert "view_range" in await tools.get_edit_error("view", "a", view_range="the end")
    assert "surprise" in await tools.get_edit_error("view", "a", surprise=1)


async def test_null_means_an_omitted_argument(tools, folder):
    (folder / "a").write_text("one\n")
    await tools.edit("view", "a", view_range=None, old_str=None, insert_line=None)


async def test_mode_survives_an_edit(tools, folder):
    script = folder / "run.sh"
    script.write_text("#!/bin/sh\necho 1\n")
    script.chmod(0o751)
    await tools.edit("str_replace", "run.sh", old_str="echo 1", new_str="echo 2")
    assert script.stat().st_mode & 0o7777 == 0o751


async def test_symbolic_link_stays_a_link(tools, folder):
    (folder / "real.txt").write_text("one\n")
    (folder / "link.txt").symlink_to("real.txt")
    await tools.edit("str_replace", "link.txt", old_str="one", new_str="two")
    assert (folder / "link.txt").is_symlink()
    assert (folder / "real.txt").read_text() == "two\n"


async def test_edit_does_not_write_through_a_hard_link(tools, folder):
    outside = folder.parent / "outside"
    outside.write_text("one\n")
    os.link(outside, folder / "inside")
    await tools.edit("str_replace", "inside", old_str="one", new_str="two")
    assert outside.read_text() == "one\n"
    assert (folder / "inside").read_text() == "two\n"


async def test_edit_leaves_no_temporary_file(tools, folder):
    (folder / "a").write_text("one\n")
    await tools.edit("str_replace", "a", old_str="one", new_str="two")
    assert os.listdir(folder) == ["a"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everything")
async def test_read_only_file_is_refused(tools, folder):
    (folder / "a").write_text("one\n")
    (folder / "a").chmod(0o444)
    assert "read-only" in await tools.get_edit_error("str_replace", "a", old_str="one", new_str="two")


async def test_file_changed_since_it_was_seen_is_refused_until_viewed_again(tools, folder):
    (folder / "a").write_text("one\ntwo\n")
    await tools.edit("view", "a")
    (folder / "a").write_text("one\ntwo\nthree\n")
    for command, arguments in (
        ("str_replace", {"old_str": "one", "new_str": "1"}),
        ("insert", {"insert_line": 0, "new_str": "1"}),
        ("create", {"file_text": "1"}),
    ):
        assert "changed since you last saw it" in await tools.get_edit_error(command, "a", **arguments)
    assert (folder / "a").read_text() == "one\ntwo\nthree\n"
    await tools.edit("view", "a")
    await tools.edit("str_replace", "a", old_str="one", new_str="1")


async def test_file_that_was_never_viewed_may_be_edited_by_str_replace(tools, folder):
    (folder / "a").write_text("one\n")
    await tools.edit("str_replace", "a", old_str="one", new_str="1")


async def test_undo_reverts_edit_after_edit_and_then_the_creation(tools, folder):
    path = folder / "a.txt"
    await tools.edit("create", "a.txt", file_text="one\n")
    await tools.edit("str_replace", "a.txt", old_str="one", new_str="two")
    await tools.edit("insert", "a.txt", insert_line=1, new_str="three")
    first = await tools.edit("undo_edit", "a.txt")
    assert path.read_text() == "two\n"
    assert texts(first) == (str(path), "two\nthree\n", "two\n")
    await tools.edit("undo_edit", "a.txt")
    assert path.read_text() == "one\n"
    last = await tools.edit("undo_edit", "a.txt")
    assert not path.exists()
    assert texts(last) == (str(path), "one\n", None)
    assert "no edit" in await tools.get_edit_error("undo_edit", "a.txt")


async def test_undo_distinguishes_equal_edits(tools, folder):
    await tools.edit("create", "a", file_text="one\n")
    for old, new in (("one", "two"), ("two", "one"), ("one", "two")):
        await tools.edit("str_replace", "a", old_str=old, new_str=new)
    for text in ("one\n", "two\n", "one\n"):
        await tools.edit("undo_edit", "a")
        assert (folder / "a").read_text() == text


async def test_undo_refuses_when_the_file_changed_since(tools, folder):
    await tools.edit("create", "a", file_text="one\n")
    (folder / "a").write_text("mine\n")
    assert "changed after your last edit" in await tools.get_edit_error("undo_edit", "a")
    await tools.edit("view", "a")
    assert "changed after your last edit" in await tools.get_edit_error("undo_edit", "a")
    assert (folder / "a").read_text() == "mine\n"


async def test_sessions_do_not_undo_each_other(tools, folder):
    await tools.edit("create", "a", file_text="one\n")
    other = await tools.call("file_editor", {"command": "undo_edit", "path": "a"}, session="other")
    assert other.is_error
    assert (folder / "a").exists()


async def test_dry_run_reports_the_change_and_writes_nothing(tools, folder):
    (folder / "a").write_text("one\n")
    before = sorted(folder.rglob("*"))
    edits = [
        {"command": "str_replace", "path": "a", "old_str": "one", "new_str": "two"},
        {"command": "insert", "path": "a", "insert_line": 1, "new_str": "two"},
        {"command": "create", "path": "deep/b", "file_text": "two\n"},
    ]
    for arguments in edits:
        dry = await tools.call("file_editor", arguments, dry_run=True)
        assert not dry.is_error
        assert "nothing was written" in dry.text
        assert sorted(folder.rglob("*")) == before
        assert (folder / "a").read_text() == "one\n"
        wet = await tools.call("file_editor", arguments)
        assert wet.changes == dry.changes
        undone = await tools.call("file_editor", {"command": "undo_edit", "path": arguments["path"]}, dry_run=True)
        assert undone.changes[0]["old"] == wet.changes[0]["new"]
        await tools.edit("undo_edit", arguments["path"])
        if (folder / "deep").exists():
            (folder / "deep").rmdir()


async def test_view_with_dry_run_does_not_count_as_viewed(tools, folder):
    (folder / "a").write_text("precious")
    await tools.call("file_editor", {"command": "view", "path": "a"}, dry_run=True)
    assert "View it first" in await tools.get_edit_error("create", "a", file_text="x")


async def test_simultaneous_edits_of_one_file_are_all_made(tools, folder):
    (folder / "a").write_text("".join(f"<{n}>\n" for n in range(30)))
    await asyncio.gather(*(tools.edit("str_replace", "a", old_str=f"<{n}>", new_str=f"[{n}]") for n in range(30)))
    assert (folder / "a").read_text() == "".join(f"[{n}]\n" for n in range(30))


async def test_relative_absolute_and_home_paths_lead_to_the_same_file(tools, folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    (folder / "a").write_text("one\n")
    for path in ("a", "./a", "x/../a", folder / "a", "~/a"):
        if path == "x/../a":
            (folder / "x").mkdir()
        assert (await tools.edit("view", path)).text.startswith(f"{folder}/a ")


@pytest.mark.parametrize("path", ["", "  ", "a\0b", "\ud800"])
async def test_invalid_path_is_refused(tools, path):
    assert "is not a path" in await tools.get_edit_error("view", path)


async def test_no_file_outside_of_the_roots_opens(tools, folder):
    outside = folder.parent
    (outside / "secret").write_text("secret")
    (outside / "project-twin").mkdir()
    (outside / "project-twin" / "secret").write_text("secret")
    (folder / "to_file").symlink_to(outside / "secret")
    (folder / "to_folder").symlink_to(outside)
    (folder / "dangling").symlink_to(outside / "not-yet")
    (folder / "loop").symlink_to("loop")
    paths = [
        outside / "secret",
        "../secret",
        "x/../../secret",
        "../project-twin/secret",
        f"{folder}/../secret",
        f"{folder}-twin/secret",
        "to_file",
        "to_folder/secret",
        "dangling",
        "~root/secret",
        "/etc/passwd",
        f"/proc/self/root{outside}/secret",
        "/proc/self/environ",
        "/dev/null",
    ]
    for path in paths:
        text = await tools.get_edit_error("view", path)
        assert "outside of the folders" in text
        assert str(folder) in text
        assert "outside of the folders" in await tools.get_edit_error("create", path, file_text="owned")
        assert "outside of the folders" in await tools.get_edit_error(
            "str_replace", path, old_str="secret", new_str="owned"
        )
    await tools.get_edit_error("view", "loop")
    assert (outside / "secret").read_text() == "secret"
    assert not (outside / "not-yet").exists()


async def test_files_in_every_root_can_be_edited(tools, folder):
    second = folder.parent / "second"
    second.mkdir()
    (second / "a").write_text("one\n")
    result = await tools.call(
        "file_editor", {"command": "view", "path": str(second / "a")}, roots=[str(folder), str(second)]
    )
    assert not result.is_error


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_link_created_between_check_and_use_does_not_lead_outside(tools, folder):
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "a").write_text("secret\n")
    inside, parked = folder / "sub", folder / "parked"
    inside.mkdir()
    (inside / "a").write_text("open\n")
    stop = asyncio.Event()

    def swap() -> None:
        for step in (
            lambda: inside.rename(parked),
            lambda: inside.symlink_to(outside),
            lambda: inside.unlink(),
            lambda: parked.exists() and shutil.rmtree(inside),  # create may have made the folder anew
            lambda: parked.rename(inside),
        ):
            with suppress(OSError):
                step()

    async def attack() -> None:
        while not stop.is_set():
            await asyncio.to_thread(lambda: [swap() for _ in range(20)])

    attacker = asyncio.create_task(attack())
    for n in range(334):
        viewed = await tools.call("file_editor", {"command": "view", "path": "sub/a"}, session=str(n))
        assert "secret" not in viewed.text
        await tools.call(
            "file_editor",
            {"command": "str_replace", "path": "sub/a", "old_str": "e", "new_str": "E"},
            session=str(n),
        )
        await tools.call("file_editor", {"command": "create", "path": "sub/new", "file_text": "x"}, session=str(n))
    stop.set()
    await attacker
    assert (outside / "a").read_text() == "secret\n"
    assert os.listdir(outside) == ["a"]


async def test_the_oldest_session_is_forgotten_when_there_are_too_many(tools, folder):
    (folder / "a").write_text("one")
    await tools.edit("view", "a")
    for n in range(100):
        await tools.call("file_editor", {"command": "view", "path": "a"}, session=f"later {n}")
    assert "has not been viewed" in await tools.get_edit_error("create", "a", file_text="x")


async def test_edits_beyond_the_limit_cannot_be_undone(tools, folder):
    (folder / "a").write_text("0" + "x" * 1_500_000)
    for n in range(5):
        await tools.edit("str_replace", "a", old_str=f"{n}x", new_str=f"{n + 1}x")
    undone = 0
    while not (await tools.call("file_editor", {"command": "undo_edit", "path": "a"})).is_error:
        undone += 1
    assert undone == 2


async def test_edit_too_large_to_be_undone_does_not_displace_others(tools, folder):
    (folder / "huge").write_text("0" + "x" * 4_500_000)
    (folder / "small").write_text("one\n")
    await tools.edit("str_replace", "small", old_str="one", new_str="two")
    await tools.edit("str_replace", "huge", old_str="0x", new_str="1x")
    assert "no edit" in await tools.get_edit_error("undo_edit", "huge")
    await tools.edit("undo_edit", "small")
    assert (folder / "small").read_text() == "one\n"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def hold_files(monkeypatch, times):
    """Let the system refuse to replace a file, as Windows does while another program has it open, so many times."""

    def replace_held(old, new):
        attempts.append(new)
        if len(attempts) <= times:
            error = PermissionError(13, "The process cannot access the file")
            error.winerror = 32
            raise error
        rename(old, new)

    attempts, rename = [], os.replace
    monkeypatch.setattr(os, "replace", replace_held)


@pytest.mark.skipif(system.HAS_DESCRIPTORS, reason="only Windows lets programs hold a file; CROW_TEST_SYSTEM=paths")
async def test_edit_waits_for_a_program_that_holds_the_file_for_a_moment(tools, folder, monkeypatch):
    (folder / "a.txt").write_text("one\n")
    hold_files(monkeypatch, 3)
    await tools.edit("str_replace", "a.txt", old_str="one", new_str="two")
    assert (folder / "a.txt").read_text() == "two\n"


@pytest.mark.skipif(system.HAS_DESCRIPTORS, reason="only Windows lets programs hold a file; CROW_TEST_SYSTEM=paths")
async def test_edit_of_a_file_that_a_program_holds_changes_nothing_and_says_so(tools, folder, monkeypatch):
    (folder / "a.txt").write_text("one\n")
    monkeypatch.setattr(held, "HELD_TIMEOUT", 0)
    hold_files(monkeypatch, 1_000_000)
    error = await tools.get_edit_error("str_replace", "a.txt", old_str="one", new_str="two")
    assert error == "str_replace a.txt: another program has it open. Nothing was changed."
    assert [each.name for each in folder.iterdir()] == ["a.txt"]
    assert (folder / "a.txt").read_text() == "one\n"


async def test_two_cases_of_a_name_are_one_file_where_the_folder_ignores_case(tools, folder):
    (folder / "Notes.txt").write_text("one\n")
    if not (folder / "nOTES.tXT").exists():
        pytest.skip("This folder does not ignore case; `just caseless FOLDER` runs this in one that does.")
    assert "exists" in await tools.get_edit_error("create", "NOTES.txt", file_text="lost\n")
    await tools.edit("str_replace", "notes.TXT", old_str="one", new_str="two")
    assert ((folder / "notes.TXT").read_text(), len([*folder.iterdir()])) == ("two\n", 1)
    await tools.edit("undo_edit", "notes.TXT")
    assert ((folder / "notes.TXT").read_text(), len([*folder.iterdir()])) == ("one\n", 1)
