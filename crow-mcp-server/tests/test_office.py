"""The tool `file_editor` on Word, Excel and PowerPoint files."""

import io
import re
import zipfile
from datetime import date
from pathlib import Path
from typing import Any

import docx
import openpyxl
import openpyxl.chart
import pptx
import pytest
from crow_mcp_server.files import formats, office
from docx.enum.text import WD_BREAK
from pptx.chart.data import CategoryChartData
from pptx.enum.chart import XL_CHART_TYPE
from pptx.util import Inches

pytestmark = pytest.mark.anyio

PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de"
    "0000000c49444154789c63606060000000040001f61738550000000049454e44ae426082"
)
BOMB = (
    '<?xml version="1.0"?><!DOCTYPE b [<!ENTITY a0 "crow">'
    + "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 11))
    + "]>"
)


def save(document: Any) -> bytes:
    document.save(file := io.BytesIO())
    return file.getvalue()


def make_word() -> bytes:
    document = docx.Document()
    document.add_heading("Crows", 1)
    document.add_paragraph("They remember ").add_run("faces").bold = True
    document.add_paragraph("black", "List Bullet")
    document.add_paragraph("clever", "List Bullet")
    table = document.add_table(2, 2)
    for cell, text in zip(table._cells, ["bird", "grams", "raven", "1200 | 2"], strict=True):
        cell.text = text
    document.add_picture(io.BytesIO(PIXEL))
    document.add_paragraph("").add_run().add_break(WD_BREAK.PAGE)
    document.add_paragraph("The second page")
    return save(document)


def make_workbook() -> bytes:
    book = openpyxl.Workbook()
    book.active.title = "Prices"
    for row in [
        ["name", "price", "since"],
        ["corn | maize", 2.0, date(2026, 1, 2)],
        [],
        ["total", "=SUM(B2:B2)", True],
    ]:
        book.active.append(row)
    book.create_sheet("Secret").sheet_state = "hidden"
    book.create_chartsheet("Chart").add_chart(openpyxl.chart.BarChart())
    return save(book)


def make_presentation() -> bytes:
    show = pptx.Presentation()
    slide = show.slides.add_slide(show.slide_layouts[1])
    slide.shapes.title.text = "Crows"
    body = slide.placeholders[1].text_frame
    body.text = "black"
    below = body.add_paragraph()
    below.text, below.level = "very", 1
    slide.notes_slide.notes_text_frame.text = "Say it slowly."
    slide = show.slides.add_slide(show.slide_layouts[6])
    box = (Inches(1), Inches(1), Inches(3), Inches(2))
    table = slide.shapes.add_table(1, 2, *box).table
    table.cell(0, 0).text, table.cell(0, 1).text = "raven", "1200"
    group = slide.shapes.add_group_shape()
    group.shapes.add_textbox(*box).text_frame.text = "in a group"
    slide.shapes.add_picture(io.BytesIO(PIXEL), *box[:2])
    data = CategoryChartData()
    data.categories = ["2025", "2026"]
    data.add_series("birds", (3, 4.5))
    slide.shapes.add_chart(XL_CHART_TYPE.COLUMN_CLUSTERED, *box, data)
    return save(show)


FILES = {"docx": make_word, "xlsx": make_workbook, "pptx": make_presentation}


def lines_of(text: str) -> list[str]:
    """Return the lines of a view that are not empty, without their numbers."""
    return [line for numbered in text.splitlines()[1:] if (line := numbered.partition("\t")[2])]


def change_part(data: bytes, name: str, change: Any) -> bytes:
    """Return an archive with one part changed."""
    with zipfile.ZipFile(io.BytesIO(data)) as before, zipfile.ZipFile(out := io.BytesIO(), "w", 8) as after:
        for part in before.namelist():
            after.writestr(part, change(before.read(part)) if part == name else before.read(part))
    return out.getvalue()


async def test_word_document_is_shown_as_markdown(tools: Any, folder: Path):
    (folder / "a.docx").write_bytes(make_word())
    result = await tools.edit("view", "a.docx")
    assert result.text.startswith(f"{folder}/a.docx (the text of a Word document)\n     1\t# Crows\n")
    assert lines_of(result.text) == [
        "# Crows",
        "They remember **faces**",
        "- black",
        "- clever",
        "| bird | grams |",
        "| --- | --- |",
        "| raven | 1200 \\| 2 |",
        "![](image)",
        "[page break]",
        "The second page",
    ]
    end = await tools.edit("view", "a.docx", view_range=[-1, -1])
    assert lines_of(end.text) == ["The second page"]


async def test_workbook_is_shown_sheet_by_sheet_with_the_names_of_its_cells(tools: Any, folder: Path):
    (folder / "a.xlsx").write_bytes(make_workbook())
    assert lines_of((await tools.edit("view", "a.xlsx")).text) == [
        "## Sheet 1 of 3: Prices",
        "|  | A | B | C |",
        "| --- | --- | --- | --- |",
        "| 1 | name | price | since |",
        "| 2 | corn \\| maize | 2 | 2026-01-02 00:00:00 |",
        "| 4 | total | =SUM(B2:B2) | TRUE |",
        "## Sheet 2 of 3: Secret (hidden)",
        "[empty]",
        "## Sheet 3 of 3: Chart",
        "[chart]",
    ]


async def test_calculated_cell_shows_its_value(tools: Any, folder: Path):
    data = change_part(
        make_workbook(),
        "xl/worksheets/sheet1.xml",
        lambda xml: re.sub(rb"</f><v ?/>|</f><v></v>", b"</f><v>7</v>", xml),
    )
    (folder / "a.xlsx").write_bytes(data)
    assert "| 4 | total | 7 | TRUE |" in lines_of((await tools.edit("view", "a.xlsx")).text)


async def test_presentation_is_shown_slide_by_slide(tools: Any, folder: Path):
    (folder / "a.pptx").write_bytes(make_presentation())
    assert lines_of((await tools.edit("view", "a.pptx")).text) == [
        "## Slide 1 of 2: Crows",
        "- black",
        "  - very",
        "Notes: Say it slowly.",
        "## Slide 2 of 2",
        "| raven | 1200 |",
        "| --- | --- |",
        "in a group",
        "[image: image.png]",
        "[chart: no title]",
        "|  | 2025 | 2026 |",
        "| birds | 3 | 4.5 |",
    ]


async def test_slide_show_and_macros_are_shown_whatever_the_name(tools: Any, folder: Path):
    show = b"application/vnd.openxmlformats-officedocument.presentationml.slideshow.main+xml"
    usual = b"application/vnd.openxmlformats-officedocument.presentationml.presentation.main+xml"
    data = change_part(make_presentation(), "[Content_Types].xml", lambda xml: xml.replace(usual, show))
    (folder / "show").write_bytes(data)
    assert "## Slide 1 of 2: Crows" in lines_of((await tools.edit("view", "show")).text)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", FILES)
async def test_office_file_is_not_edited(kind: office.OfficeKind, tools: Any, folder: Path):
    path = folder / f"a.{kind}"
    path.write_bytes(data := FILES[kind]())
    await tools.edit("view", path)
    for command, arguments in {
        "str_replace": {"old_str": "Crows", "new_str": "Ravens"},
        "insert": {"insert_line": 0, "new_str": "x"},
        "create": {"file_text": "x"},
    }.items():
        assert f"with {office.WRITERS[kind]}." in await tools.get_edit_error(command, path, **arguments)
    assert path.read_bytes() == data
    assert "Nothing was written" in await tools.get_edit_error("create", f"b.{kind}", file_text="# Crows")
    assert not (folder / f"b.{kind}").exists()


@pytest.mark.parametrize("kind", FILES)
async def test_without_the_extra_the_error_says_how_to_install_it(
    kind: office.OfficeKind, tools: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    (folder / f"a.{kind}").write_bytes(FILES[kind]())
    monkeypatch.setattr(office, "find_spec", lambda name: None)
    text = await tools.get_edit_error("view", f"a.{kind}")
    assert "not installed" in text
    assert "uv pip install --python" in text


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", FILES)
async def test_damaged_file_is_refused_in_one_line(kind: office.OfficeKind, tools: Any, folder: Path):
    data = FILES[kind]()
    main = {"docx": "word/document.xml", "xlsx": "xl/workbook.xml", "pptx": "ppt/presentation.xml"}[kind]
    damaged = [
        data[: len(data) // 2],
        b"PK\x03\x04" + bytes(100),
        b"\0" * 500,
        change_part(data, main, lambda xml: xml[:50]),
        change_part(data, main, lambda xml: b""),
        change_part(data, "_rels/.rels", lambda xml: b"<Relationships/>"),
        change_part(data, "[Content_Types].xml", lambda xml: b"\xff"),
        data[:200] + bytes(200) + data[400:],
    ]
    for number, each in enumerate(damaged):
        (folder / f"a.{kind}").write_bytes(each)
        result = await tools.call("file_editor", {"command": "view", "path": f"a.{kind}"})
        assert "Traceback" not in result.text
        if result.is_error:
            assert "\n" not in result.text, number
            assert "damaged" in result.text, number
        else:
            assert number > 4, result.text  # a library reads on without a part
    assert not await tools.wait_for_pids(0)


def make_compound(*streams: str) -> bytes:
    """Return the start of a file in the format of before 2007, with the names of its streams."""
    return (
        office.COMPOUND_FILE
        + bytes(504)
        + b"".join(f"{name}\0".encode("utf-16-le").ljust(128, b"\0") for name in streams)
    )


@pytest.mark.parametrize(
    ("name", "stream", "sentence"),
    [
        ("a.doc", "WordDocument", "a Word document in the format of before 2007"),
        ("a.xls", "Workbook", "--convert-to xlsx"),
        ("a.xls", "Book", "--convert-to xlsx"),
        ("a.ppt", "PowerPoint Document", "--convert-to pptx"),
        ("a.docx", "WordDocument", "--convert-to docx"),
        ("a.xlsx", "EncryptedPackage", "with a password"),
        ("a.msi", "Tables", "binary file"),
    ],
)
async def test_old_and_encrypted_files_are_refused_with_a_sentence(
    name: str, stream: str, sentence: str, tools: Any, folder: Path
):
    (folder / name).write_bytes(make_compound("Root Entry", stream))
    assert sentence in await tools.get_edit_error("view", name)
    assert sentence in await tools.get_edit_error("str_replace", name, old_str="a", new_str="b")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", FILES)
async def test_entity_bomb_is_refused_or_ignored(kind: office.OfficeKind, tools: Any, folder: Path):
    part = {"docx": "word/document.xml", "xlsx": "xl/worksheets/sheet1.xml", "pptx": "ppt/slides/slide1.xml"}[kind]
    (folder / "secret").write_text("the secret")

    def plant(xml: bytes, doctype: str) -> bytes:
        text = xml.decode()
        body = text[text.index("?>") + 2 :] if text.startswith("<?xml") else text
        return (doctype + re.sub(r"(?<=[>])(Crows|black|2)(?=<)", "&a10;", body)).encode()

    outside = f'<?xml version="1.0"?><!DOCTYPE b [<!ENTITY a10 SYSTEM "file://{folder}/secret">]>'
    for doctype in (BOMB, outside):
        (folder / "bomb").write_bytes(
            change_part(FILES[kind](), part, lambda xml, doctype=doctype: plant(xml, doctype))
        )
        result = await tools.call("file_editor", {"command": "view", "path": "bomb"})
        assert "the secret" not in result.text
        assert result.text.count("crow") < 100
        assert len(result.text) < 2_000


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", FILES)
async def test_file_that_unpacks_without_an_end_is_refused(kind: office.OfficeKind, tools: Any, folder: Path):
    with (
        zipfile.ZipFile(out := io.BytesIO(FILES[kind]()), "a", 8, compresslevel=1) as archive,
        archive.open("x.xml", "w") as part,
    ):
        for _ in range(210):
            part.write(bytes(2**20))
    (folder / "bomb").write_bytes(out.getvalue())
    assert "unpacks to more than" in await tools.get_edit_error("view", "bomb")


@pytest.mark.slow
async def test_large_part_is_refused_before_it_fills_the_memory(
    tools: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(formats, "READ_TIMEOUT", 5.0)
    paragraphs = b"<w:p/>" * 30_000_000
    data = change_part(make_word(), "word/document.xml", lambda xml: xml.replace(b"<w:body>", b"<w:body>" + paragraphs))
    (folder / "long.docx").write_bytes(data)
    text = await tools.get_edit_error("view", "long.docx")
    assert "too much" in text or "too long" in text


async def test_file_that_takes_too_long_is_refused(tools: Any, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(formats, "READ_TIMEOUT", 0.0)
    for name, data in (("a.docx", make_word()), ("a.pdf", b"%PDF-1.4\n")):
        (folder / name).write_bytes(data)
        assert "it takes too long" in await tools.get_edit_error("view", name)


async def test_long_sheet_is_shown_in_part_and_says_so(tools: Any, folder: Path):
    book = openpyxl.Workbook(write_only=True)
    sheet = book.create_sheet("Long")
    for number in range(office.MAX_ROWS + 10):
        sheet.append([number])
    book.create_sheet("Next").append(["here"])
    (folder / "a.xlsx").write_bytes(save(book))
    shown = lines_of((await tools.edit("view", "a.xlsx", view_range=[-10, -1])).text)
    assert shown == [
        f"| {office.MAX_ROWS - 1} | {office.MAX_ROWS - 2} |",
        f"| {office.MAX_ROWS} | {office.MAX_ROWS - 1} |",
        f"[rows from {office.MAX_ROWS + 1} on are left out: read them in the terminal with Python and openpyxl]",
        "## Sheet 2 of 2: Next",
        "|  | A |",
        "| --- | --- |",
        "| 1 | here |",
    ]


async def test_sheet_with_a_million_empty_rows_and_columns_is_short(tools: Any, folder: Path):
    data = change_part(
        make_workbook(),
        "xl/worksheets/sheet1.xml",
        lambda xml: re.sub(rb'<dimension ref="[^"]*"', b'<dimension ref="A1:XFD1048576"', xml).replace(
            b'<row r="4"', b'<row r="1048576"'
        ),
    )
    (folder / "a.xlsx").write_bytes(re.sub(rb"x", b"x", data))
    assert len((await tools.edit("view", "a.xlsx")).text.splitlines()) < 20


async def test_text_with_the_name_of_an_office_file_is_text(tools: Any, folder: Path):
    (folder / "a.xls").write_text("<table>\n")
    (folder / "b.docx").write_text("words\n")
    assert "     1\t<table>" in (await tools.edit("view", "a.xls")).text
    await tools.edit("view", "b.docx")
    await tools.edit("str_replace", "b.docx", old_str="words", new_str="letters")


async def test_other_archives_stay_binary(tools: Any, folder: Path):
    with zipfile.ZipFile(folder / "a.zip", "w") as archive:
        archive.writestr("word/a.txt", "x")
    assert "binary file" in await tools.get_edit_error("view", "a.zip")
