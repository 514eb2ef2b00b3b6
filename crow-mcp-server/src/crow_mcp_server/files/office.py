"""Word, Excel and PowerPoint files: detect them, and convert them to Markdown.

The libraries are the extra `office`. They read foreign files in a process of their own: see `web/page_text.py`.
"""

# the libraries have no types:
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingImports=false, reportUnknownLambdaType=false

import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from io import BytesIO
from itertools import repeat
from typing import Any, Literal
from zipfile import BadZipFile, ZipFile

OfficeKind = Literal["docx", "xlsx", "pptx"]

NAMES: dict[OfficeKind, str] = {
    "docx": "a Word document",
    "xlsx": "an Excel workbook",
    "pptx": "a PowerPoint presentation",
}
LIBRARIES: dict[OfficeKind, str] = {"docx": "mammoth", "xlsx": "openpyxl", "pptx": "pptx"}
"""The modules that read the files."""
WRITERS: dict[OfficeKind, str] = {"docx": "python-docx", "xlsx": "openpyxl", "pptx": "python-pptx"}
"""Libraries that make and change the files, for a model that is told what to use."""
EXTRA = ("mammoth", "openpyxl", "python-pptx")
"""The distributions of the extra `office`."""
FOLDERS: dict[str, OfficeKind] = {"word/": "docx", "xl/": "xlsx", "ppt/": "pptx"}
"""The folder with the content in the archive, as all programs write it (ECMA-376)."""
SUFFIXES: dict[OfficeKind, tuple[str, ...]] = {
    "docx": (".docx", ".docm", ".dotx", ".dotm"),
    "xlsx": (".xlsx", ".xlsm", ".xltx", ".xltm"),
    "pptx": (".pptx", ".pptm", ".potx", ".potm", ".ppsx", ".ppsm"),
}
COMPOUND_FILE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
"""The start of a file of Office before 2007, and of one with a password (MS-CFB)."""
STREAMS: dict[str, OfficeKind] = {
    "WordDocument": "docx",
    "Workbook": "xlsx",
    "Book": "xlsx",
    "PowerPoint Document": "pptx",
}
"""Names in such a file."""
MAX_UNPACKED_BYTES = 200 * 1024 * 1024
MAX_ROWS = 5_000  # of a sheet that are shown
MAX_CHARACTERS = 5_000_000  # of all sheets
PAGE_BREAK = "[page break]"


class UnreadableOffice(Exception):
    """The file cannot be converted. The message is a clause such as "it unpacks to more than …"."""


def detect_kind(data: bytes) -> OfficeKind | None:
    """Detect the kind of a file by its content; None if it is not an Office file of 2007 or later."""
    if not data.startswith(b"PK\x03\x04"):
        return None
    try:
        with ZipFile(BytesIO(data)) as archive:
            names = archive.namelist()
    except (BadZipFile, ValueError, NotImplementedError):  # all that zipfile raises for a damaged list of names
        return None
    if "[Content_Types].xml" not in names or "xl/workbook.bin" in names:
        return None
    return next((kind for folder, kind in FOLDERS.items() if any(name.startswith(folder) for name in names)), None)


def get_named_kind(path: str) -> OfficeKind | None:
    """Return the kind that the name of a file promises."""
    return next((kind for kind, suffixes in SUFFIXES.items() if path.lower().endswith(suffixes)), None)


def is_readable(kind: OfficeKind) -> bool:
    """Return whether the library for these files is installed."""
    return find_spec(LIBRARIES[kind]) is not None


def make_install_command() -> str:
    """Return the command that installs the libraries for this program."""
    return shlex.join(["uv", "pip", "install", "--python", sys.executable, *EXTRA])


def describe_binary(path: str, data: bytes) -> str | None:
    """Describe an Office file that is neither text nor convertible, and say what to do; None for any other file."""
    if data.startswith(COMPOUND_FILE):
        if "EncryptedPackage".encode("utf-16-le") in data:
            return (
                f"{path} is an Office file with a password, which this tool cannot open. "
                "Ask the user for a copy without one."
            )
        for stream, kind in STREAMS.items():
            if f"{stream}\0".encode("utf-16-le") in data:
                return (
                    f"{path} is {NAMES[kind]} in the format of before 2007, which this tool does not read. "
                    f"Convert it in the terminal (soffice --headless --convert-to {kind}) and view the copy."
                )
    if kind := get_named_kind(path):
        return f"{path} is damaged, or not {NAMES[kind]}: it is not a zip archive with the parts of one."
    return None


def convert(data: bytes, kind: OfficeKind) -> str:
    """Convert a file to Markdown. Raises UnreadableOffice."""
    try:
        with ZipFile(BytesIO(data)) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size <= MAX_UNPACKED_BYTES:
            return "\n\n".join(CONVERTERS[kind](data))
    except MemoryError:
        raise
    except Exception as error:  # the libraries raise anything for a damaged file
        raise UnreadableOffice(f"it is damaged ({type(error).__name__}: {_to_line(str(error))})") from error
    raise UnreadableOffice(f"it unpacks to more than {MAX_UNPACKED_BYTES:,} bytes")


def _convert_text(data: bytes) -> Iterator[str]:
    """Yield a Word document, with a mark for each page break that its author made."""
    import html_to_markdown
    import mammoth

    styles = "br[type='page'] => hr\ncomment-reference => sup"
    images = mammoth.images.img_element(lambda _: {"src": "image"})
    result = mammoth.convert_to_html(
        BytesIO(data), style_map=styles, convert_image=images, include_embedded_style_map=False
    )
    html = result.value.replace("<hr />", f"<p>{PAGE_BREAK}</p>")
    options = html_to_markdown.ConversionOptions(heading_style="atx", compact_tables=True)
    yield (html_to_markdown.convert(html, options).content or "").strip()


def _convert_sheets(data: bytes) -> Iterator[str]:
    """Yield the sheets of an Excel workbook as tables with the letters of columns and the numbers of rows.

    A cell shows its value, or its formula if the workbook was never calculated.
    """
    import openpyxl
    from openpyxl.utils import get_column_letter

    values = openpyxl.load_workbook(BytesIO(data), read_only=True, data_only=True)
    formulas = openpyxl.load_workbook(BytesIO(data), read_only=True) if _has_formulas(data) else None
    names, length = values.sheetnames, 0
    for number, name in enumerate(names, 1):
        sheet = values[name]
        hidden = "" if sheet.sheet_state == "visible" else " (hidden)"
        heading = f"## Sheet {number} of {len(names)}: {_to_line(name)}{hidden}"
        if sheet not in values.worksheets:
            yield f"{heading}\n\n[chart]"
            continue
        if length > MAX_CHARACTERS:
            yield f"{heading}\n\n[left out: the workbook is too long]"
            continue
        rows = _read_rows(sheet)
        others = _read_rows(formulas[name]) if formulas else repeat(())
        lines, width, rest = list[str](), 0, ""
        for row, (cells, formula) in enumerate(zip(rows, others, strict=False), 1):
            texts = [_format_cell(value) for value in _choose(cells, formula)]
            while texts and not texts[-1]:
                texts.pop()
            if not texts:
                continue
            if len(lines) == MAX_ROWS or length > MAX_CHARACTERS:
                rest = f"\n\n[rows from {row} on are left out: read them in the terminal with Python and openpyxl]"
                break
            lines.append(_format_row([str(row), *texts]))
            width, length = max(width, len(texts)), length + len(lines[-1])
        letters = [get_column_letter(column) for column in range(1, width + 1)]
        table = [_format_row(["", *letters]), _format_row(["---"] * (width + 1)), *lines] if lines else ["[empty]"]
        yield f"{heading}\n\n" + "\n".join(table) + rest


def _has_formulas(data: bytes) -> bool:
    with ZipFile(BytesIO(data)) as archive:
        return any(
            re.search(rb"<(\w+:)?f[\s>]", archive.read(name))
            for name in archive.namelist()
            if name.startswith("xl/worksheets/") and name.endswith(".xml")
        )


def _read_rows(sheet: Any) -> Iterable[Sequence[Any]]:
    sheet.reset_dimensions()  # a file may declare a million rows, to which openpyxl would fill it up
    return sheet.iter_rows(values_only=True)


def _choose(values: Sequence[Any], formulas: Sequence[Any]) -> Iterator[Any]:
    for column, value in enumerate(values):
        yield formulas[column] if value is None and column < len(formulas) else value


def _format_cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case bool():
            return str(value).upper()
        case float() if value.is_integer() and abs(value) < 1e15:
            return str(int(value))
        case _:
            text = getattr(value, "text", None)  # a formula of several cells
            return _to_line(str(value if text is None else text))


def _convert_slides(data: bytes) -> Iterator[str]:
    """Yield the slides of a PowerPoint presentation, with their tables and notes."""
    from pptx.package import Package

    slides: Any = Package.open(BytesIO(data)).main_document_part.presentation.slides
    for number, slide in enumerate(slides, 1):
        title = slide.shapes.title
        heading = f"## Slide {number} of {len(slides)}"
        if title is not None and title.text_frame.text.strip():
            heading += f": {_to_line(title.text_frame.text)}"
        if slide.element.get("show") == "0":
            heading += " (hidden)"
        blocks = [heading]
        for shape in slide.shapes:
            if title is None or shape.shape_id != title.shape_id:
                blocks += _convert_shape(shape)
        if slide.has_notes_slide and (frame := slide.notes_slide.notes_text_frame) and frame.text.strip():
            blocks.append(f"Notes: {frame.text.strip()}")
        yield "\n\n".join(blocks)


def _convert_shape(shape: Any) -> Iterator[str]:
    if hasattr(shape, "shapes"):  # a group
        for inner in shape.shapes:
            yield from _convert_shape(inner)
    elif getattr(shape, "has_table", False):
        rows = [[_to_line(cell.text) for cell in row.cells] for row in shape.table.rows]
        lines = [_format_row(row) for row in rows]
        yield "\n".join([*lines[:1], _format_row(["---"] * len(rows[0])), *lines[1:]])
    elif getattr(shape, "has_chart", False):
        yield "\n".join(_convert_chart(shape.chart))
    elif shape.has_text_frame:
        lines = [
            f"{'  ' * paragraph.level}- {text}" if shape.is_placeholder else text
            for paragraph in shape.text_frame.paragraphs
            if (text := paragraph.text.replace("\v", "\n").strip())
        ]
        if lines:
            yield "\n".join(lines)
    elif hasattr(shape, "image"):
        about = shape._element.xpath("string(.//p:cNvPr/@descr)")
        yield f"[image: {_to_line(about or shape.name)}]"


def _convert_chart(chart: Any) -> Iterator[str]:
    titled = chart.has_title and chart.chart_title.has_text_frame
    yield f"[chart: {_to_line(chart.chart_title.text_frame.text) if titled else 'no title'}]"
    for plot in chart.plots:
        yield _format_row(["", *(_to_line(str(category)) for category in plot.categories)])
        for series in plot.series:
            yield _format_row([_to_line(series.name), *map(_format_cell, series.values)])


CONVERTERS: dict[OfficeKind, Callable[[bytes], Iterable[str]]] = {
    "docx": _convert_text,
    "xlsx": _convert_sheets,
    "pptx": _convert_slides,
}


def _format_row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _to_line(text: str) -> str:
    return " ".join(text.split())
