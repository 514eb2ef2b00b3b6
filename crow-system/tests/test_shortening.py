"""Texts are shortened in one way, and say how much of them is left out."""

import pytest
from crow_system.shortening import leave_out, shorten_line, shorten_middle


@pytest.mark.parametrize("limit", range(3, 12))
def test_shortened_text_keeps_to_its_limit(limit: int):
    assert len(shorten_line("0123456789", limit)) <= limit
    assert len(shorten_middle("0123456789", limit)) <= limit


def test_text_within_its_limit_stays():
    for shorten in (shorten_line, shorten_middle, leave_out):
        assert shorten("0123456789", 10) == "0123456789"


def test_shortened_line_ends_without_a_space_before_the_ellipsis():
    assert shorten_line("one two three", 5) == "one…"


def test_note_says_how_much_is_left_out_and_where_it_is():
    text = "a" * 600 + "b" * 600
    assert leave_out(text, 3) == "aaa\n\n[1,197 of 1,200 characters left out]"
    assert leave_out(text, 5, "look there", tail=2, space=" ") == (
        "aaa [1,195 of 1,200 characters left out; look there] bb"
    )
