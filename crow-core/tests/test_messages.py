"""Deltas become a reply, and a log becomes a request that every server accepts."""

import copy
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from crow_core.messages import message as messages
from crow_core.messages.message import (
    INTERRUPTED,
    Delta,
    Message,
    RawToolCall,
    answer_tool_call,
    find_unanswered,
    parse_arguments,
    settle,
)
from crow_core.messages.passes import (
    PASSES,
    SUMMARY_TEMPLATE,
    complete_answers,
    drop_notes,
    drop_rewound,
    drop_unsent,
    find_markers,
    join_user_messages,
    move_images,
    repair_calls,
    select_entries,
    view,
)
from crow_core.messages.view import View
from crow_core.models.reply import ObjectEnd, ReplyBuilder
from hypothesis import given, settings
from hypothesis import strategies as st

Fragment = dict[str, Any]


def fragment(name: Any = None, arguments: Any = None, **more: Any) -> Fragment:
    """Make a fragment of a tool call; `more` is its id and index."""
    return {**more, "function": {"name": name, "arguments": arguments}}


def join(*deltas: Delta) -> Message:
    """Join the deltas of a reply."""
    reply = ReplyBuilder()
    for delta in deltas:
        reply.add(delta)
    return reply.build()


def settle_fragments(*fragments: Fragment, used: set[str] | None = None) -> list[tuple[str, str, str]]:
    """Merge and settle fragments, one in each delta; return id, name and arguments of each call."""
    calls = settle(join(*({"tool_calls": [piece]} for piece in fragments)), used=set() if used is None else used).get(
        "tool_calls", []
    )
    return [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls]


def use(id: str, name: str = "f", arguments: str = "{}") -> RawToolCall:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant_with_calls(*calls: RawToolCall, **more: Any) -> Message:
    return Message(role="assistant", tool_calls=list(calls), **more)


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def says(content: str) -> Message:
    return {"role": "assistant", "content": content}


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def test_text_and_reasoning_are_merged_separately() -> None:
    reply = join({"reasoning_content": "H"}, {"content": "Y", "reasoning_content": "m"}, {"content": "es"})
    assert reply == {"role": "assistant", "reasoning_content": "Hm", "content": "Yes"}


def test_delta_of_notice_and_usage_leaves_the_reply_unchanged() -> None:
    reply = join({"notice": "wait", "usage": {"a": 1}, "finish_reason": "stop"})
    assert reply == {"role": "assistant"}


def test_content_before_the_end_of_thought_becomes_reasoning() -> None:
    thought: Delta = {"reasoning_content": "a", "content": "b"}
    reply = join(thought, {"thought_ends": True, "reasoning_content": "c", "content": "d"})
    assert reply == {"role": "assistant", "reasoning_content": "abc", "content": "d"}


def test_end_of_thought_without_text_before_it_adds_no_text() -> None:
    reply = join({"thought_ends": True}, {"content": "Yes."})
    assert reply == {"role": "assistant", "reasoning_content": "", "content": "Yes."}
    other = join({"content": "Hm."}, {"thought_ends": True})
    assert other == {"role": "assistant", "reasoning_content": "Hm."}


def test_notes_of_a_reply_are_kept_when_it_is_settled() -> None:
    reply = join({"tool_calls": [fragment("f", "{}", index=0, id="a")]})
    reply.setdefault("crow", {})["id"] = "r1"
    assert settle(reply, used=set()) == assistant_with_calls(use("a"), crow={"id": "r1"})


def test_name_repeated_without_an_id_behind_the_arguments_starts_no_call() -> None:
    repeated = [fragment("f", '{"a":1}', index=0, id="a"), fragment("f", "", index=1)]
    assert settle_fragments(*repeated) == [("a", "f", '{"a":1}')]


def test_answer_of_a_tool_call_holds_the_notes_it_is_given() -> None:
    assert answer_tool_call(use("a"), "done", failed=True) == {
        "role": "tool",
        "tool_call_id": "a",
        "content": "done",
        "crow": {"failed": True},
    }


def test_fragments_with_index_and_one_id_make_one_call() -> None:
    pieces = (
        fragment("f", "", index=0, id="a"),
        fragment(arguments='{"x"', index=0),
        fragment(arguments=": 1}", index=0),
    )
    assert settle_fragments(*pieces) == [("a", "f", '{"x": 1}')]


def test_id_repeated_on_every_fragment_is_the_same_call() -> None:
    pieces = fragment("f", '{"x"', index=0, id="a"), fragment("f", ": 1}", index=0, id="a"), fragment("f", "", id="a")
    assert settle_fragments(*pieces) == [("a", "f", '{"x": 1}')]


@pytest.mark.parametrize("id", [None, ""])
def test_call_without_an_id_gets_one(id: str | None) -> None:
    assert settle_fragments(fragment("f", "{}", index=0, id=id), fragment("g", "{}", index=1, id=id)) == [
        ("call", "f", "{}"),
        ("call_2", "g", "{}"),
    ]


def test_empty_id_on_later_fragments_does_not_end_the_call() -> None:
    pieces = fragment("f", '{"x"', index=0, id="a"), fragment("", ": 1}", index=0, id="")
    assert settle_fragments(*pieces) == [("a", "f", '{"x": 1}')]


def test_late_id_belongs_to_the_call_of_its_index() -> None:
    pieces = fragment("f", "", index=0), fragment("g", "", index=1), fragment(arguments="{}", index=0, id="a")
    assert settle_fragments(*pieces) == [("a", "f", "{}"), ("call", "g", "{}")]


def test_late_id_with_a_name_belongs_to_the_arguments_before_it() -> None:
    assert settle_fragments(fragment(arguments='{"x": ', index=0), fragment("f", "1}", index=0, id="a")) == [
        ("a", "f", '{"x": 1}')
    ]


def test_id_of_an_earlier_turn_is_replaced() -> None:
    used: set[str] = set()
    turns = [settle_fragments(fragment("f", "{}", id="a"), used=used) for _ in range(3)]
    assert [calls[0][0] for calls in turns] == ["a", "a_2", "a_3"]
    assert used == {"a", "a_2", "a_3"}


def test_generated_ids_are_unique_across_turns() -> None:
    used: set[str] = set()
    ids = [settle_fragments(fragment("f", "{}"), fragment("g", "{}"), used=used) for _ in range(2)]
    assert [call[0] for calls in ids for call in calls] == ["call", "call_2", "call_3", "call_4"]


def test_parallel_calls_under_one_id_get_two_ids() -> None:
    pieces = (
        fragment("f", "{}", index=0, id="a"),
        fragment("f", '{"x"', index=1, id="a"),
        fragment(arguments=": 1}", index=1),
    )
    assert settle_fragments(*pieces) == [("a", "f", "{}"), ("a_2", "f", '{"x": 1}')]


def test_parallel_calls_with_one_index_are_separated_by_id() -> None:
    pieces = [fragment("f", '{"x"', index=0, id="a"), fragment(arguments=": 1}", index=0)]
    pieces += [fragment("f", '{"x"', index=0, id="b"), fragment(arguments=": 2}", index=0)]
    assert settle_fragments(*pieces) == [("a", "f", '{"x": 1}'), ("b", "f", '{"x": 2}')]


@pytest.mark.parametrize("place", [{}, {"index": 0}, {"index": 0, "id": ""}, {"index": None, "id": None}])
def test_parallel_calls_with_one_index_and_no_ids_are_separated_by_name(place: Fragment) -> None:
    pieces = [fragment("f", "", **place), fragment(None, '{"x": 1}', **place), fragment("f", '{"x": 2}', **place)]
    pieces += [fragment("g", None, **place), fragment(None, '{"x"', **place), fragment(None, ": 3}", **place)]
    assert settle_fragments(*pieces) == [
        ("call", "f", '{"x": 1}'),
        ("call_2", "f", '{"x": 2}'),
        ("call_3", "g", '{"x": 3}'),
    ]


@pytest.mark.parametrize("place", [{}, {"index": 0}, {"id": "a"}, {"index": 0, "id": "a"}])
def test_name_repeated_on_every_fragment_starts_no_call(place: Fragment) -> None:
    pieces = fragment("f", '{"x"', **place), fragment("f", ": 1}", **place), fragment("f", "", **place)
    assert [call[1:] for call in settle_fragments(*pieces)] == [("f", '{"x": 1}')]


@pytest.mark.parametrize("index", [{"index": 0}, {}])
@pytest.mark.parametrize("again", [{"index": 0}, {}])
def test_a_known_id_continues_its_call_even_if_the_arguments_look_complete(index: Fragment, again: Fragment) -> None:
    pieces = fragment("f", "{}", **index, id="a"), fragment("f", "\n!", **again, id="a")
    told_apart = again and not index  # a late index belongs to another call
    assert settle_fragments(*pieces) == (
        [("a", "f", "{}"), ("a_2", "f", "\n!")] if told_apart else [("a", "f", "{}\n!")]
    )


@pytest.mark.parametrize("index", [{"index": 0}, {}])
@pytest.mark.parametrize("second", ["f", "g"])
@pytest.mark.parametrize("parts", [['{"x": 2}'], ["", '{"x": 2}'], ['{"x"', ": 2}"]])
def test_two_calls_with_one_id_and_one_index_are_separated(index: Fragment, second: str, parts: list[str]) -> None:
    pieces = [fragment("f", '{"x": 1}', **index, id="a"), fragment(second, parts[0], **index, id="a")]
    pieces += [fragment(arguments=part, **index) for part in parts[1:]]
    assert settle_fragments(*pieces) == [("a", "f", '{"x": 1}'), ("a_2", second, '{"x": 2}')]


def test_call_that_is_sent_twice_in_whole_is_one_call() -> None:
    call, other = fragment("f", '{"x": 1}', index=0, id="a"), fragment("f", '{"x": 1}', index=1, id="b")
    assert [id for id, _, _ in settle_fragments(call, other, call, other)] == ["a", "b"]


@pytest.mark.parametrize("id", [5, 5.5, True, ["a"], {"a": 1}])
def test_id_that_is_no_text_is_one_id_in_all_fragments(id: Any) -> None:
    pieces = fragment("f", '{"x"', index=0, id=id), fragment("f", ": 1}", index=0, id=id)
    assert settle_fragments(*pieces) == [(str(id), "f", '{"x": 1}')]


def test_two_calls_of_one_tool_without_arguments_are_separated_by_id() -> None:
    pieces = fragment("f", "{}", index=0, id="a"), fragment("f", "", index=1, id="b")
    assert settle_fragments(*pieces) == [("a", "f", "{}"), ("b", "f", "{}")]


def test_fragments_of_a_name_are_joined() -> None:
    assert settle_fragments(fragment("get_", index=0, id="a"), fragment("weather", "{}", index=0)) == [
        ("a", "get_weather", "{}")
    ]


def test_alternating_fragments_of_parallel_calls_are_separated() -> None:
    pieces = [fragment("f", "", index=0, id="a"), fragment("g", "", index=1, id="b")]
    pieces += [fragment(arguments=piece, index=index) for piece in ('{"x"', ": 1}") for index in (0, 1)]
    assert settle_fragments(*pieces) == [("a", "f", '{"x": 1}'), ("b", "g", '{"x": 1}')]


def test_null_names_arguments_and_functions_are_ignored() -> None:
    pieces = fragment("f", None, index=0, id="a"), {"index": 0, "function": None}, fragment(None, "{}", index=0)
    assert settle_fragments(*pieces) == [("a", "f", "{}")]


def test_arguments_that_are_an_object_become_json_text() -> None:
    assert settle_fragments(fragment("f", {"x": [1, None, "ü"]}, id="a")) == [("a", "f", '{"x":[1,null,"ü"]}')]


@pytest.mark.parametrize("nothing", [None, ""])
def test_missing_arguments_become_an_empty_object(nothing: str | None) -> None:
    assert settle_fragments(fragment("f", nothing, id="a")) == [("a", "f", "{}")]


@pytest.mark.parametrize(
    "broken",
    [
        *('{"x": ', "[1]", '"x"', "null", "x", '{"x": 1}{"x": 1}', "[" * 100_000, '{"x": NaN}', '{"x": 1e999}'),
        '{"x": ' + "[" * 200 + "]" * 200 + "}",
    ],
)
def test_arguments_that_are_no_json_object_are_kept_and_parse_as_none(broken: str) -> None:
    ((id, name, arguments),) = settle_fragments(fragment("f", broken, id="a"))
    assert (id, name, arguments) == ("a", "f", broken)
    assert parse_arguments(use("a", arguments=broken)) is None


@pytest.mark.parametrize("arguments", [None, ""])
def test_call_without_a_name_and_arguments_is_dropped(arguments: str | None) -> None:
    assert settle_fragments(fragment(arguments=arguments, index=0, id="a")) == []


def test_call_without_a_name_but_with_arguments_is_kept() -> None:
    assert settle_fragments(fragment(arguments="{}", index=0, id="a")) == [("a", "", "{}")]


def test_calls_of_a_truncated_reply_are_dropped_and_noted() -> None:
    reply = join({"content": "Let me"}, {"tool_calls": [fragment("rm", '{"path": "/', index=0, id="a")]})
    assert settle(reply, used=set(), whole=False) == {
        "role": "assistant",
        "content": "Let me",
        "crow": {"dropped_calls": ["rm"]},
    }


def test_text_of_a_truncated_reply_is_kept() -> None:
    reply: Message = {"role": "assistant", "content": "Half"}
    assert settle(reply, used=set(), whole=False) == {"role": "assistant", "content": "Half"}


def test_settled_reply_has_no_merge_notes() -> None:
    reply = join({"tool_calls": [fragment("f", "{}", index=0, id="a")]})
    assert settle(reply, used=set()) == assistant_with_calls(use("a"))


OBJECTS = st.sampled_from(["{}", '{"x": 1}', '{"path": "a b", "y": {"z": []}}', '{"ü": "}{"}', '{"x": "\\"}"}'])


@st.composite
def replies(draw: st.DrawFn) -> tuple[list[tuple[str, str]], list[Fragment], bool]:
    """Draw tool calls as (name, arguments), their fragments in a legal order, and whether the fragments have ids."""
    calls = draw(st.lists(st.tuples(st.sampled_from(["f", "get_weather"]), OBJECTS), min_size=1, max_size=4))
    ids = draw(st.sampled_from(["every", "first", "none"]))
    indexes = draw(st.sampled_from(["own", "shared", "none"]))
    said_again = draw(st.booleans())
    lines: list[list[Fragment]] = []
    for at, (name, arguments) in enumerate(calls):
        cuts = sorted(draw(st.sets(st.integers(1, len(arguments) - 1), max_size=3)))
        first: list[str | None] = draw(st.sampled_from([[], [""], [None]]))
        pieces = first + [arguments[start:end] for start, end in zip([0, *cuts], [*cuts, None], strict=True)]
        line = [fragment(name if n == 0 or said_again else None, piece) for n, piece in enumerate(pieces)]
        for n, here in enumerate(line):
            if ids == "every" or (ids == "first" and n == 0):
                here["id"] = f"id{at}"
            if indexes != "none":
                here["index"] = at if indexes == "own" else 0
        lines.append(line)
    order = [at for at, line in enumerate(lines) for _ in line]
    if indexes == "own" or ids == "every":  # otherwise only their order separates the calls
        order = draw(st.permutations(order))
    return calls, [lines[at].pop(0) for at in order], ids != "none"


@settings(deadline=None)
@given(replies(), st.data())
def test_any_legal_interleaving_of_fragments_gives_the_same_calls(
    drawn: tuple[list[tuple[str, str]], list[Fragment], bool], data: st.DataObject
) -> None:
    calls, fragments, with_ids = drawn
    reply = ReplyBuilder()
    while fragments:
        count = data.draw(st.integers(1, len(fragments)), label="fragments in this delta")
        reply.add({"tool_calls": fragments[:count]})
        del fragments[:count]
    found = settle(reply.build(), used=set()).get("tool_calls", [])

    assert sorted((call["function"]["name"], call["function"]["arguments"]) for call in found) == sorted(calls)
    assert len({call["id"] for call in found}) == len(calls)
    if with_ids:
        by_id = {call["id"]: (call["function"]["name"], call["function"]["arguments"]) for call in found}
        assert by_id == {f"id{at}": call for at, call in enumerate(calls)}


def test_calls_in_a_flood_of_named_fragments_are_parsed_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some servers repeat the name with every fragment. Whether the call is complete is not parsed anew each time."""
    parsed: list[RawToolCall] = []
    monkeypatch.setattr(messages, "parse_arguments", lambda use: parsed.append(use) or parse_arguments(use))
    arguments = json.dumps({"text": "{}[] \\" * 500, "more": [{"a": [1]}] * 500})
    pieces = [fragment("f", piece, index=0) for piece in arguments]
    twice = [{**piece, "index": at} for at in (0, 1) for piece in pieces]
    assert settle_fragments(*twice) == [("call", "f", arguments), ("call_2", "f", arguments)]
    assert len(parsed) <= 2


@settings(deadline=None)
@given(
    st.recursive(st.text('ab{}[]"\\ü', max_size=5), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)),
    st.sampled_from(["", " ", "\n\n", "x", "}", "{}", '"']),
    st.data(),
)
def test_end_of_an_object_is_found_at_any_split(value: Any, rest: str, data: st.DataObject) -> None:
    text = json.dumps({"a": value}, ensure_ascii=data.draw(st.booleans()))
    end, whole = ObjectEnd(), text + rest
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)), max_size=8)))
    for start, stop in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        end.feed(whole[start:stop])
        assert end.is_reached == (stop >= len(text))
    assert end.is_passed == bool(rest.strip())


TEXT_DELTAS = st.fixed_dictionaries(
    {}, optional={"content": st.text(), "reasoning_content": st.text(), "thought_ends": st.booleans()}
)


@settings(deadline=None)
@given(st.lists(st.tuples(TEXT_DELTAS, st.booleans())))
def test_parts_taken_at_any_time_give_the_reply(drawn: list[tuple[Any, bool]]) -> None:
    reply, joined = ReplyBuilder(), Message()
    for delta, is_taken in [*drawn, ({}, True)]:
        reply.add(delta)
        if is_taken:
            part = reply.take_part()
            if part.get("crow", {})["part"] == 0:
                joined = Message()
            for key in ("reasoning_content", "content"):
                joined[key] = str(joined.get(key) or "") + str(part.get(key) or "")
    whole = reply.build()
    for key in ("reasoning_content", "content"):
        assert joined.get(key) == (whole.get(key) or "")


def test_markers_are_not_sent() -> None:
    log: list[Message] = [{"crow": {"kind": "title"}}, user("Hi"), {"crow": {"kind": "render"}}]
    assert drop_unsent(log) == [user("Hi")]


@pytest.mark.parametrize(
    "silent",
    [
        {"role": "assistant", "reasoning_content": "Hm."},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": " \n"},
        {"role": "assistant", "content": [{"type": "text", "text": ""}]},
        {"role": "assistant", "content": "", "tool_calls": []},
    ],
)
def test_reply_without_text_or_calls_is_not_sent(silent: Message) -> None:
    assert drop_unsent([user("Hi"), silent, says("Yes")]) == [user("Hi"), says("Yes")]


def test_reply_with_calls_only_is_sent() -> None:
    assert drop_unsent([assistant_with_calls(use("a"), content=None)]) == [assistant_with_calls(use("a"), content=None)]


def test_invalid_arguments_are_sent_as_an_object_that_shows_them() -> None:
    log = [assistant_with_calls(use("a", arguments='{"x": '), use("b", arguments='{"x": 1}'))]
    assert repair_calls(log) == [
        assistant_with_calls(use("a", arguments='{"invalid_json":"{\\"x\\": "}'), use("b", arguments='{"x": 1}'))
    ]


def test_arguments_with_half_a_surrogate_pair_are_shown_unchanged() -> None:
    log = [assistant_with_calls(use("a", arguments='{"x": "\ud800"}'))]
    assert repair_calls(log) == [assistant_with_calls(use("a", arguments='{"invalid_json":"{\\"x\\": \\"\ud800\\"}"}'))]


def test_missing_arguments_are_sent_as_an_empty_object() -> None:
    assert repair_calls([assistant_with_calls(use("a", arguments=""))]) == [
        assistant_with_calls(use("a", arguments="{}"))
    ]


def test_unanswered_call_is_sent_with_an_answer_that_says_interrupted() -> None:
    log = [assistant_with_calls(use("a"), use("b")), answer_tool_call(use("b"), "done"), user("Go on")]
    assert complete_answers(log) == [
        assistant_with_calls(use("a"), use("b")),
        answer_tool_call(use("a"), INTERRUPTED),
        *log[1:],
    ]


def test_answers_are_sent_behind_their_calls_in_order() -> None:
    log = [
        assistant_with_calls(use("a"), use("b")),
        answer_tool_call(use("b"), "2"),
        user("Hi"),
        answer_tool_call(use("a"), "1"),
        says("Yes"),
    ]
    assert complete_answers(log) == [log[0], log[3], log[1], log[2], log[4]]


def test_stray_and_second_answers_are_not_sent() -> None:
    a, x = use("a"), use("x")
    log = [
        answer_tool_call(x, "?"),
        assistant_with_calls(a),
        answer_tool_call(a, "1"),
        answer_tool_call(x, "?"),
        answer_tool_call(a, "2"),
        says("Yes"),
        answer_tool_call(a, "3"),
    ]
    assert complete_answers(log) == [assistant_with_calls(a), answer_tool_call(a, "1"), says("Yes")]


def test_answer_behind_a_later_reply_does_not_answer_an_earlier_call() -> None:
    log = [assistant_with_calls(use("a")), user("Go on"), says("Yes"), answer_tool_call(use("a"), "late")]
    assert complete_answers(log) == [
        assistant_with_calls(use("a")),
        answer_tool_call(use("a"), INTERRUPTED),
        user("Go on"),
        says("Yes"),
    ]


def test_ids_reused_in_a_later_turn_keep_their_own_answers() -> None:
    log = [
        assistant_with_calls(use("a")),
        answer_tool_call(use("a"), "1"),
        assistant_with_calls(use("a")),
        answer_tool_call(use("a"), "2"),
    ]
    assert complete_answers(log) == log


def test_images_of_tools_follow_the_answers_and_are_numbered_in_both_places() -> None:
    a, b, c = use("a"), use("b"), use("c")
    results = [
        answer_tool_call(a, [text("One:"), IMAGE, IMAGE]),
        answer_tool_call(b, "no image"),
        answer_tool_call(c, [IMAGE]),
    ]
    one, two, three = (f"[image {n} of these tool results]" for n in (1, 2, 3))
    assert move_images([assistant_with_calls(a, b, c), *results, says("I see.")]) == [
        assistant_with_calls(a, b, c),
        answer_tool_call(a, f"One:\n\n{one}\n\n{two}"),
        answer_tool_call(b, "no image"),
        answer_tool_call(c, three),
        user([text(one), IMAGE, text(two), IMAGE, text(three), IMAGE]),
        says("I see."),
    ]


def test_images_of_the_last_answers_are_sent_too() -> None:
    *_, last = move_images([assistant_with_calls(use("a")), answer_tool_call(use("a"), [IMAGE])])
    assert last.get("role") == "user"


def test_tool_message_is_always_one_text() -> None:
    assert move_images([answer_tool_call(use("a"), [text("x"), text("y")])]) == [answer_tool_call(use("a"), "x\n\ny")]


def test_images_of_tools_join_the_next_user_message() -> None:
    label = "[image 1 of these tool results]"
    log = [user("Look"), assistant_with_calls(use("a")), answer_tool_call(use("a"), [IMAGE]), user("Well?")]
    assert view(log)[-2:] == [
        {"role": "tool", "tool_call_id": "a", "content": label},
        user([text(label), IMAGE, text("Well?")]),
    ]


def test_images_of_the_user_stay_in_place() -> None:
    assert view([user([text("What is this?"), IMAGE])]) == [user([text("What is this?"), IMAGE])]


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [
        ("a", "b", "a\n\nb"),
        ("a", [IMAGE], [text("a"), IMAGE]),
        ([IMAGE], "b", [IMAGE, text("b")]),
        ("", "b", "b"),
        ("", [IMAGE], [IMAGE]),
    ],
)
def test_two_user_messages_in_a_row_become_one(first: Any, second: Any, both: Any) -> None:
    assert join_user_messages([user(first), user(second)]) == [user(both)]


def test_only_keys_of_the_protocol_are_sent_in_a_fixed_order() -> None:
    log: list[Message] = [
        {"crow": {"id": "1"}, "content": "Hi", "role": "user"},
        {"reasoning_content": "Hm.", "tool_calls": [use("a")], "role": "assistant", "crow": {"cut": "x"}},
        {"content": "ok", "crow": {"failed": True}, "tool_call_id": "a", "role": "tool"},
    ]
    sent = drop_notes(log)
    assert sent == [
        user("Hi"),
        {**assistant_with_calls(use("a"), content=""), "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "a", "content": "ok"},
    ]
    assert [list(message) for message in sent] == [
        ["role", "content"],
        ["role", "reasoning_content", "content", "tool_calls"],
        ["role", "tool_call_id", "content"],
    ]


def test_example_log_becomes_the_expected_request() -> None:
    log: list[Message] = [
        {"crow": {"kind": "render"}},
        user("Do it"),
        {"role": "assistant", "reasoning_content": "How?", "crow": {"id": "1"}},
        user("Well?"),
        assistant_with_calls(
            use("a", "look", '{"path": "'), use("b"), content="Looking.", reasoning_content="Hm.", crow={"id": "2"}
        ),
        answer_tool_call(use("b"), [text("seen"), IMAGE], failed=True),
        {"crow": {"kind": "decision"}},
        user("Stop"),
    ]
    label = "[image 1 of these tool results]"
    assert view(log) == [
        user("Do it\n\nWell?"),
        assistant_with_calls(
            use("a", "look", '{"invalid_json":"{\\"path\\": \\""}'),
            use("b"),
            content="Looking.",
            reasoning_content="Hm.",
        ),
        answer_tool_call(use("a"), INTERRUPTED),
        answer_tool_call(use("b"), f"seen\n\n{label}"),
        user([text(label), IMAGE, text("Stop")]),
    ]


def assert_valid(messages: Sequence[Message]) -> None:
    """Check the rules of chat completions that the strictest servers and templates have."""
    awaited: list[str] = []
    before = ""
    for message in messages:
        role = message.get("role")
        keys = {"role", "content", "tool_calls", "tool_call_id", "reasoning_content"}
        assert set(message) <= keys, "only the protocol's keys, and what some endpoints want back"
        if role == "tool":
            assert awaited, "no stray answer"
            assert message.get("tool_call_id") == awaited.pop(0), "answers in the order asked"
            assert isinstance(message.get("content"), str), "an answer is a text"
        else:
            assert not awaited, "each call is answered directly behind its message"
            assert role in ("user", "assistant")
            assert "tool_call_id" not in message
        if role == "user":
            assert before != "user", "no two user messages in a row"
        if role == "assistant":
            calls = message.get("tool_calls", [])
            assert calls or str(message.get("content")).strip(), "no empty reply"
            assert isinstance(message.get("content"), str)
            assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in calls)
            awaited = [call["id"] for call in calls]
        else:
            assert "tool_calls" not in message
        before = role
    assert not awaited, "no call is left without an answer"


contents = st.one_of(
    st.sampled_from(["", " ", "words", "Zürich"]),
    st.lists(st.sampled_from([IMAGE, text(""), text("words")]), max_size=3),
)
arguments_texts = st.sampled_from(["{}", '{"x": 1}', '{"x": ', "[]", "null", "", "  ", '{"x": 1}}', '{"\\ud800": 1}'])
notes: st.SearchStrategy[Any] = st.sampled_from([{}, {"crow": {"id": "7"}}])
rarely = st.sampled_from([False, False, False, True])


@st.composite
def turns(draw: st.DrawFn, number: int) -> list[Message]:
    """Draw a reply and the answers to its calls: one, an error, two, none, or one for another call, in any order."""
    names = draw(st.lists(st.tuples(st.sampled_from(["f", "g"]), arguments_texts), max_size=3))
    calls = [use(f"{number}-{at}", *call) for at, call in enumerate(names)]
    reply = Message(role="assistant", **draw(notes))
    if draw(st.booleans()):
        reply["content"] = draw(st.sampled_from([None, "", "\n", "words"]))
    if draw(st.booleans()):
        reply["reasoning_content"] = "Hm."
    if calls or draw(st.booleans()):
        reply["tool_calls"] = calls
    answers = [answer_tool_call(call, draw(contents), **draw(notes)) for call in calls if not draw(rarely)]
    if draw(rarely):
        answers += [answer_tool_call(use("nobody"), "?"), *answers[:1]]
    return [reply, *draw(st.permutations(answers))]


@st.composite
def logs(draw: st.DrawFn) -> list[Message]:
    log: list[Message] = []
    for number, kind in enumerate(draw(st.lists(st.sampled_from(["reply", "user", "marker"]), max_size=6))):
        match kind:
            case "reply":
                log += draw(turns(number))
            case "user":
                log.append(Message(role="user", content=draw(contents), **draw(notes)))
            case _:
                log.append({"crow": {"kind": "decision"}})
    return log


@settings(deadline=None)
@given(logs(), st.data())
def test_every_start_of_a_log_gives_a_valid_request(log: list[Message], data: st.DataObject) -> None:
    assert_valid(view(log[: data.draw(st.integers(0, len(log)))]))


@settings(deadline=None)
@given(logs())
def test_view_does_not_change_the_log(log: list[Message]) -> None:
    before = copy.deepcopy(log)
    view(log)
    assert log == before
    for step in PASSES:
        step(log)
        assert log == before


@settings(deadline=None)
@given(logs())
def test_view_of_a_view_is_the_same(log: list[Message]) -> None:
    assert view(view(log)) == view(log)


@settings(deadline=None)
@given(logs())
def test_view_has_exactly_the_calls_of_the_log(log: list[Message]) -> None:
    asked = [call["id"] for message in log for call in message.get("tool_calls", [])]
    sent = [call["id"] for message in view(log) for call in message.get("tool_calls", [])]
    assert sent == asked


@settings(deadline=None)
@given(logs(), st.lists(st.integers(0, 30)))
def test_incremental_view_of_a_growing_log_equals_the_view_of_the_whole(log: list[Message], stops: list[int]) -> None:
    grown: list[Message] = []
    growing = View(grown)
    for stop in [*sorted({min(stop, len(log)) for stop in stops}), len(log)]:
        grown += log[len(grown) : stop]
        assert growing.messages() == view(grown)


def id_of(entry: Message) -> str:
    return entry.get("crow", {}).get("id", "")


@st.composite
def logs_with_markers(draw: st.DrawFn) -> list[Message]:
    """Draw a log with markers at any place that remove, restore, shorten, sum up or pin entries."""
    log: list[Message] = []
    for at, message in enumerate(draw(logs())):
        log.append({**message, "crow": {**message.get("crow", {}), "id": str(at)}})
        ids = ["", "unknown", *map(id_of, log)]
        some = st.lists(st.sampled_from(ids), max_size=3)
        match draw(st.sampled_from(["", "", "rewind", "shrink", "compaction"])):
            case "rewind":
                notes = {"kind": "rewind", "to": draw(st.sampled_from(["", *map(id_of, drop_rewound(log))]))}
            case "shrink":
                upto, limit = draw(st.sampled_from(ids)), draw(st.integers(0, 5))
                notes = {"kind": "shrink", "upto": upto, "limit": limit, "pinned": draw(some), "tool": "read_output"}
            case "compaction":
                start = draw(st.sampled_from(ids))
                notes = {"kind": "compaction", "from": start, "pinned": draw(some), "summary": "Well."}
            case _:
                continue
        log.append({"crow": {**notes, "id": f"marker {at}"}})
    return log


@settings(deadline=None)
@given(logs_with_markers(), st.lists(st.integers(0, 60)))
def test_any_markers_give_a_valid_request_and_an_equal_incremental_view(log: list[Message], stops: list[int]) -> None:
    grown: list[Message] = []
    growing, before = View(grown), copy.deepcopy(log)
    for stop in [*sorted({min(stop, len(log)) for stop in stops}), len(log)]:
        grown += log[len(grown) : stop]
        assert_valid(view(grown))
        assert growing.messages() == view(grown)
        assert growing.select() == select_entries(grown)
        assert growing.entries() == drop_rewound(grown)
        for kind, key in (("shrink", "upto"), ("compaction", "from")):
            assert list(growing.find_markers(kind, key)) == list(find_markers(drop_rewound(grown), kind, key))
    assert log == before


@settings(deadline=None)
@given(logs_with_markers(), st.data())
def test_a_view_tells_what_markers_at_the_end_would_leave(log: list[Message], data: st.DataObject) -> None:
    growing, some = View(log), st.sampled_from(["", "unknown", *map(id_of, log)])
    pinned = data.draw(st.lists(some, max_size=3))
    shrink: Message = {"crow": {"kind": "shrink", "upto": data.draw(some), "limit": 3, "pinned": pinned}}
    compaction: Message = {"crow": {"kind": "compaction", "from": data.draw(some), "summary": "So.", "pinned": pinned}}
    for markers in ([shrink], [compaction], [shrink, compaction], [compaction, shrink]):
        assert growing.messages(*markers) == view([*log, *markers])
        assert growing.select(*markers) == select_entries([*log, *markers])
    assert growing.messages() == view(log)


class WatchedEntry(dict[str, Any]):
    """An entry that counts how often any entry is read."""

    reads = 0

    def get(self, key: str, default: Any = None) -> Any:
        WatchedEntry.reads += 1
        return super().get(key, default)


def count_reads(turns: int) -> int:
    """Count the reads of entries that the requests of the last turn take, of a session that is compacted each turn."""
    log: list[Any] = []
    growing = View(log)
    before = 0
    for turn in range(turns):
        before = WatchedEntry.reads
        entries: list[Message] = [
            user("Go on"),
            assistant_with_calls(use(f"{turn}")),
            answer_tool_call(use(f"{turn}"), "?"),
        ]
        log += [WatchedEntry({**entry, "crow": {"id": f"{turn} {at}"}}) for at, entry in enumerate(entries)]
        growing.messages()
        markers: list[Any] = [compaction(f"{turn} 0", "0 1"), {"crow": {"kind": "shrink", "upto": f"{turn} 2"}}]
        growing.messages(*markers)
        log += [WatchedEntry(marker) for marker in markers]
        growing.messages()
        growing.find_kind("pin")
        growing.find(f"{turn} 1")
        next(growing.find_markers("compaction", "from"))
    return WatchedEntry.reads - before


def test_a_turn_reads_as_many_entries_after_a_long_history_as_after_a_short_one() -> None:
    assert count_reads(10) == count_reads(500)


LONG = "".join(f"line {n}\n" for n in range(100))


def long_work() -> list[Message]:
    """Make a log of two turns, the second of which still runs."""
    entries: list[Message] = [
        user("Mend it"),
        assistant_with_calls(use("a", "look")),
        answer_tool_call(use("a"), LONG),
        says("Mended."),
        user("Now the other"),
        assistant_with_calls(use("b", "look"), use("c", "look")),
        answer_tool_call(use("b"), LONG),
        answer_tool_call(use("c"), [text(LONG), IMAGE]),
        assistant_with_calls(use("d", "look")),
        answer_tool_call(use("d"), LONG),
    ]
    return [{**entry, "crow": {"id": str(at)}} for at, entry in enumerate(entries)]


def compaction(start: str, *pinned: str, summary: str = "All went well.") -> Message:
    notes = {"id": "compaction", "kind": "compaction", "from": start, "pinned": pinned, "summary": summary}
    return {"crow": notes}


def test_a_compaction_leaves_the_first_prompt_pinned_entries_a_summary_and_the_rest() -> None:
    first, _, _, mended, second, *_, call, result = drop_notes(long_work())
    summed_up = user(SUMMARY_TEMPLATE.format("All went well."))
    log = [*long_work(), compaction("8", "3", "4"), says("Done.")]
    both = user(f"{second.get('content')}\n\n{summed_up.get('content')}")
    assert view(log) == [first, mended, both, call, result, says("Done.")]


def test_a_compaction_that_keeps_nothing_ends_with_its_summary() -> None:
    assert view([*long_work(), compaction("")]) == [user(f"Mend it\n\n{SUMMARY_TEMPLATE.format('All went well.')}")]


@pytest.mark.parametrize("start", ["unknown", "0"])
def test_a_compaction_with_an_unknown_start_is_ignored(start: str) -> None:
    log = [*long_work(), compaction("4")]
    assert view([*log, compaction(start, summary="?")]) == view(log)


def test_only_the_latest_compaction_counts_and_a_rewind_undoes_it() -> None:
    log = [*long_work(), compaction("4", summary="One."), says("Done."), compaction("8", summary="Two.")]
    assert "One." not in str(view(log))
    assert "Two." in str(view(log))
    assert view([*log, {"crow": {"kind": "rewind", "to": "9"}}]) == view(long_work())


def test_shortened_outputs_have_head_and_tail_and_say_how_to_read_the_whole() -> None:
    notes: dict[str, Any] = {"kind": "shrink", "upto": "8", "limit": 40, "tool": "read_output", "pinned": ["2"]}
    log = [*long_work(), Message(crow=notes)]
    pinned, short, image, late = [m.get("content") for m in view(log) if m.get("role") == "tool"]
    assert pinned == late == LONG
    line = f"[{len(LONG) - 40} of {len(LONG)} characters left out; read_output gives the whole of 'b']"
    assert short == f"{LONG[:20]}\n\n{line}\n\n{LONG[-20:]}"
    assert "'c'" in str(image)
    assert "image_url" not in str(view(log))


def test_images_of_a_shortened_output_are_left_out_and_counted_as_text() -> None:
    log: list[Message] = [
        assistant_with_calls(use("a"), use("b")),
        answer_tool_call(use("a"), [text("A plot:"), IMAGE]),
        answer_tool_call(use("b"), [text("x" * 200), IMAGE]),
        Message(crow={"kind": "shrink", "upto": "", "limit": 40, "tool": "read_output"}),
    ]
    few, many = (message.get("content") for message in view(log)[1:])
    assert few == "A plot:\n\n[image]\n\n[images left out; read_output shows those of 'a']"
    line = "[169 of 209 characters left out; read_output gives the whole of 'b']"
    assert many == f"{'x' * 20}\n\n{line}\n\n{'x' * 11}\n\n[image]"


def test_an_entry_with_a_role_is_no_marker() -> None:
    log: list[Message] = [user("one"), {**user("two"), "crow": {"kind": "rewind", "to": ""}}]
    assert view(log) == view([user("one"), user("two")])
    grown = View(log)
    assert grown.messages() == grown.messages() == view(log)


def test_summary_is_hidden_from_clients_and_only_pinned_messages_stay() -> None:
    log = [*long_work(), Message(crow={"kind": "compaction", "from": "8", "summary": "All went well."})]
    first, summary, call, *_ = select_entries(log)
    assert (first.get("content"), call) == ("Mend it", log[8])
    assert summary == {**user(SUMMARY_TEMPLATE.format("All went well.")), "crow": {"hidden": True}}
    assert select_entries([*long_work(), compaction("8", "1")])[1] == long_work()[1]


def test_a_rewind_to_the_first_entry_keeps_that_entry() -> None:
    log: list[Message] = [{**user("one"), "crow": {"id": "a"}}, {**says("First."), "crow": {"id": "b"}}]
    assert view([*log, {"crow": {"kind": "rewind", "to": "a"}}]) == view(log[:1])
    assert view([*log, {"crow": {"kind": "rewind"}}]) == view(log)


def test_an_output_that_would_not_become_shorter_stays_whole() -> None:
    log = [
        assistant_with_calls(use("a")),
        answer_tool_call(use("a"), "x" * 60),
        Message(crow={"kind": "shrink", "upto": "", "limit": 40}),
    ]
    assert view(log) == view(log[:2])


@st.composite
def rewound_logs(draw: st.DrawFn) -> list[Message]:
    """Draw a log with rewinds to visible entries."""
    log: list[Message] = []
    for at, message in enumerate(draw(logs())):
        log.append({**message, "crow": {**message.get("crow", {}), "id": str(at)}})
        if draw(st.booleans()):
            to = draw(st.sampled_from(["", *(entry.get("crow", {})["id"] for entry in drop_rewound(log))]))
            log.append({"crow": {"kind": "rewind", "to": to, "id": f"rewind {at}"}})
    return log


@settings(deadline=None)
@given(rewound_logs(), st.lists(st.integers(0, 60)))
def test_incremental_view_of_a_rewound_log_equals_the_view_of_the_whole(log: list[Message], stops: list[int]) -> None:
    grown: list[Message] = []
    growing = View(grown)
    for stop in [*sorted({min(stop, len(log)) for stop in stops}), len(log)]:
        grown += log[len(grown) : stop]
        assert growing.messages() == view(grown)


@settings(deadline=None)
@given(rewound_logs())
def test_a_log_without_rewound_entries_gives_the_same_view(log: list[Message]) -> None:
    assert drop_rewound(drop_rewound(log)) == drop_rewound(log)
    assert view(drop_rewound(log)) == view(log)


def test_rewound_entries_are_not_sent() -> None:
    log: list[Message] = [
        {**user("one"), "crow": {"id": "a"}},
        {**says("First."), "crow": {"id": "b"}},
        {**user("two"), "crow": {"id": "c"}},
        {**says("Second."), "crow": {"id": "d"}},
        {"crow": {"kind": "rewind", "to": "b", "id": "e"}},
        {**user("three"), "crow": {"id": "f"}},
    ]
    assert [message.get("content") for message in view(log)] == ["one", "First.", "three"]
    assert view([*log, {"crow": {"kind": "rewind", "to": ""}}]) == []
    assert view([*log, {"crow": {"kind": "rewind", "to": "unknown"}}]) == view(log)


def test_unanswered_calls_are_those_of_the_last_reply() -> None:
    a, b = use("a", "look"), use("b", "look")
    assert find_unanswered([]) == []
    assert find_unanswered([user("Hi"), assistant_with_calls(a, b)]) == [a, b]
    assert find_unanswered(
        [user("Hi"), assistant_with_calls(a, b), answer_tool_call(b, "seen"), {"crow": {"kind": "decision"}}]
    ) == [a]
    assert find_unanswered([assistant_with_calls(a), says("Well."), user("Hi")]) == []


def test_bytes_of_a_request_up_to_its_last_message_begin_the_next_request() -> None:
    a, b, c = use("a", "look"), use("b", "look", '{"broken'), use("c", "look")
    log: list[Message] = [{"crow": {"kind": "render"}}]
    turns: list[list[Message]] = [
        [user("Hi")],
        [says("Hello."), user([text("What is this?"), IMAGE])],
        [
            assistant_with_calls(a, b, content="Let me look.", reasoning_content="Hm."),
            answer_tool_call(b, "failed"),
            answer_tool_call(a, [text("x"), IMAGE]),
        ],
        [{"role": "assistant", "reasoning_content": "Hm."}, user("Well?")],
        [{"crow": {"kind": "decision"}}, assistant_with_calls(c), user("Stop. Do something else.")],
        [{"role": "assistant", "content": "Half a sen", "crow": {"cut": "cancelled"}}, user("Go on")],
        [assistant_with_calls(use("d")), answer_tool_call(use("d"), "done")],
    ]
    before = b""
    for rows in turns:
        log += rows
        sent = view(log)
        assert_valid(sent)
        body = msgspec.json.encode({"model": "m", "tools": [], "messages": sent})
        assert body.startswith(before)
        before = body[: body.rindex(msgspec.json.encode(sent[-1]))]
        assert len(before) > 30
