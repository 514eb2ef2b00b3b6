"""Decoding of files to text, and encoding back to the same bytes."""

from crow_mcp_server.files.document import Document, decode, reconcile
from hypothesis import given
from hypothesis import strategies as st


@given(st.binary(max_size=200))
def test_every_text_encodes_to_the_bytes_it_was_decoded_from(data):
    document = decode(data)
    assert document is None or document.encode() == data


def test_editor_that_converts_crlf_to_line_feeds_does_not_change_the_file():
    disk = Document("a\r\nb\r\n")
    assert reconcile(disk, "a\nb\n") == disk
    assert reconcile(disk, "a\nunsaved\n").text == "a\r\nunsaved\r\n"


def test_line_endings_from_an_editor_that_keeps_them_are_used():
    assert reconcile(Document("a\r\nb\n"), "a\r\nunsaved\n").text == "a\r\nunsaved\n"
