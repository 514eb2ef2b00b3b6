"""From bytes to text and back, without losing one."""

from crow_mcp_server.files.document import Document, decode, reconcile
from hypothesis import given
from hypothesis import strategies as st


@given(st.binary(max_size=200))
def test_every_text_is_written_back_as_it_was_read(data):
    document = decode(data)
    assert document is None or document.encode() == data


def test_editor_that_turns_crlf_into_line_feeds_does_not_change_the_file():
    disk = Document("a\r\nb\r\n")
    assert reconcile(disk, "a\nb\n") == disk
    assert reconcile(disk, "a\nunsaved\n").text == "a\r\nunsaved\r\n"


def test_editor_that_keeps_line_endings_is_believed():
    assert reconcile(Document("a\r\nb\n"), "a\r\nunsaved\n").text == "a\r\nunsaved\n"
