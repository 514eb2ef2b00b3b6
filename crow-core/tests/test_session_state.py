import pytest
from crow_core.session_state import SessionState, StateKey


def test_a_value_is_its_default_until_it_is_set_and_after_it_was_removed():
    notes = StateKey("notes", list[str])
    state = SessionState()
    state[notes].append("one")
    assert notes in state
    assert state.pop(notes) == ["one"]
    assert state[notes] == []
    assert SessionState()[notes] == [], "each session has a value of its own"


def test_a_value_without_default_is_an_error_until_it_is_set():
    server = StateKey[str]("server")
    with pytest.raises(KeyError, match="server"):
        SessionState()[server]


def test_two_keys_of_one_name_are_two_keys():
    state, ours, theirs = SessionState(), StateKey("notes", str), StateKey("notes", str)
    state[ours] = "ours"
    assert state[theirs] == ""
