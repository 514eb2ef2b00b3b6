"""Events become effects: the queue, cancelling, questions, lists."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from crow_core.acp.client import answer_permission
from crow_core.acp.schema import (
    AgentMessageChunk,
    AvailableCommand,
    AvailableCommandsUpdate,
    BlockContent,
    BooleanPropertySchema,
    Cost,
    CreateElicitationRequest,
    DiffContent,
    ElicitationSchema,
    ImageBlock,
    MultiSelectItems,
    MultiSelectPropertySchema,
    PermissionOption,
    PlanEntry,
    PlanUpdate,
    PromptResponse,
    RequestPermissionRequest,
    ResourceLinkBlock,
    SelectConfigOption,
    SelectEntry,
    SessionInfo,
    SessionInfoUpdate,
    StringPropertySchema,
    TextBlock,
    ToolCall,
    ToolCallFields,
    ToolCallUpdate,
    Usage,
    UsageUpdate,
    UserMessageChunk,
)
from crow_terminal.abilities import Abilities
from crow_terminal.blocks import CommandOutput, Note, UserPrompt
from crow_terminal.command_menu import list_commands
from crow_terminal.completion import ChatCompleter
from crow_terminal.dialogs import ListDialog, TextDialog
from crow_terminal.effects import (
    Cancel,
    Edit,
    Leave,
    ListTurns,
    Open,
    Respond,
    Ring,
    Send,
    SetOption,
    Show,
    Steer,
    TakeBack,
    Wait,
    Withdraw,
)
from crow_terminal.export import to_markdown
from crow_terminal.first_run import end_first_run, is_first_run, make_card
from crow_terminal.live import compose_above, compose_footer, compose_running, compose_spinner, describe_usage
from crow_terminal.local_commands import find_command, find_local_commands
from crow_terminal.markdown import Prose
from crow_terminal.mentions import find_files
from crow_terminal.paint import Painter
from crow_terminal.pickers import (
    confirm_taking_back,
    describe_age,
    offer_turns,
    pick_option,
    pick_session,
    pick_turn,
    undo_turn,
)
from crow_terminal.printable_text import measure
from crow_terminal.prompt_content import find_images, make_prompt
from crow_terminal.question import Question
from crow_terminal.session_options import OfferedOptions, find_changes
from crow_terminal.state import State
from crow_terminal.stops import describe_stop
from crow_terminal.theme import THEMES
from crow_terminal.told_outputs import describe_output
from crow_terminal.typing_pause import PAUSE
from msgspec import UNSET
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

END = PromptResponse(stop_reason="end_turn")


def ready(**fields: Any) -> State:
    state = State(**fields)
    state.open_session(None, [], 0.0)
    return state


def sent(effects: list[Any]) -> list[str]:
    return [effect.text for effect in effects if isinstance(effect, Send)]


def paint(effect: Any) -> list[str]:
    """Paint the block that an effect shows, without bold print."""
    lines = Painter(THEMES["mono"]).paint(effect.block, 80)
    return [line.replace("\x1b[1m", "").replace("\x1b[0m", "") for line in lines]


def ask(state: State, id: int = 1, now: float = 10.0, **fields: Any) -> list[Any]:
    options = [
        PermissionOption(option_id=each, name=each, kind=kind)
        for each, kind in (("yes", "allow_once"), ("always", "allow_always"), ("no", "reject_once"))
    ]
    call = ToolCallFields(tool_call_id="1", title="rm x", kind="execute", **fields)
    return state.ask(id, RequestPermissionRequest(session_id="s", tool_call=call, options=options), now)


def test_a_prompt_waits_for_the_session_and_for_the_turn_before():
    state = State()
    assert sent(state.submit("one", 0.0)) == []
    assert sent(state.open_session(None, [], 1.0)) == ["one"]
    assert sent(state.submit("two", 2.0)) == []
    assert sent(state.submit("three", 2.0)) == []
    assert sent(state.end_turn(END, 3.0)) == ["two"]
    assert sent(state.end_turn(END, 4.0)) == ["three"]
    assert sent(state.end_turn(END, 5.0)) == []


def test_outputs_of_the_users_commands_wait_for_a_prompt_that_is_no_command():
    state, output = ready(), CommandOutput("make", "done", 0)
    state.submit("!make", 0.0)
    state.end_command(output, True, 1.0)
    assert state.submit("/usage", 2.0)[-1] == Send("/usage")
    state.end_turn(END, 3.0)
    assert state.submit("so?", 4.0)[-1] == Send("so?", (output,))


def test_enter_without_text_cancels_once_for_the_next_of_the_queue():
    state = ready()
    state.submit("one", 0.0)
    assert state.submit("", 1.0) == []
    state.submit("two", 1.0)
    assert state.submit("", 1.0) == [Cancel()]
    assert state.submit("", 1.0) == []
    assert sent(state.end_turn(PromptResponse(stop_reason="cancelled"), 2.0)) == ["two"]


def test_esc_cancels_once_and_gives_the_queue_back():
    state = ready()
    assert state.stop(0.0) == []
    state.submit("one", 0.0)
    state.submit("two", 1.0)
    assert state.stop(1.0) == [Edit("two", keep=True), Cancel()]
    assert state.stop(1.0) == []
    assert sent(state.end_turn(PromptResponse(stop_reason="cancelled"), 2.0)) == []


CANCELLED = PromptResponse(stop_reason="cancelled")


def steering() -> State:
    """Return a state in a turn of an agent that takes words for it."""
    state = ready(abilities=Abilities(steers=True))
    state.submit("one", 0.0)
    return state


def steer(state: State, text: str) -> Steer:
    edit, effect = state.submit(text, 1.0)
    assert edit == Edit("")
    assert isinstance(effect, Steer)
    assert effect.text == text
    return effect


def test_enter_steers_and_words_that_are_taken_are_shown_when_the_agent_shows_them():
    state = steering()
    words = steer(state, "rather")
    assert any("» rather" in line for line in compose_above(state, 1.0, 80, 24, THEMES["mono"], []))
    chunk = UserMessageChunk(content=TextBlock(text="rather"), message_id="1")
    assert state.receive(chunk, 2.0) == []
    assert state.end_steer(words, True, 2.0) == [Show(UserPrompt("rather"))]
    assert not any("»" in line for line in compose_above(state, 2.0, 80, 24, THEMES["mono"], []))
    assert sent(state.end_turn(END, 3.0)) == []


def test_words_that_the_turn_did_not_take_are_sent_before_the_queue_whichever_answer_comes_first():
    for late in (False, True):
        state = steering()
        state.queue.outputs.append(CommandOutput("ls", "a", 0))
        first, second = steer(state, "first"), steer(state, "second")
        assert first.outputs
        state.submit("queued", 1.0, later=True)
        done = sent(state.end_turn(END, 2.0)) if late else []
        assert done == []
        done = [*sent(state.end_steer(first, False, 2.0)), *sent(state.end_steer(second, False, 2.0))]
        effects = state.end_turn(END, 2.0) if not late else []
        assert [*done, *sent(effects)] == ["first"]
        assert state.queue.prompts == ["second", "queued"]


def test_enter_without_text_sends_what_steers_as_a_prompt():
    state = steering()
    words = steer(state, "rather")
    assert state.submit("", 1.0) == [Cancel()]
    assert sent(state.end_turn(CANCELLED, 2.0)) == []
    assert sent(state.end_steer(words, False, 2.0)) == ["rather"]


def test_esc_gives_back_what_the_turn_did_not_take_and_keeps_what_is_typed():
    state = steering()
    taken, words = steer(state, "taken"), steer(state, "rather")
    assert state.stop(1.0) == [Cancel()]
    assert state.end_steer(taken, True, 1.0) == []
    assert sent(state.submit("next", 1.0)) == []
    assert sent(state.end_turn(CANCELLED, 2.0)) == []
    effects = state.end_steer(words, False, 2.0)
    assert effects[0] == Edit("rather", keep=True)
    assert sent(effects) == ["next"]


def test_a_turn_that_fails_and_an_agent_that_ends_give_back_what_was_not_taken():
    state = steering()
    words = steer(state, "rather")
    state.fail_turn("The model did not answer.", 1.0)
    assert state.end_steer(words, False, 1.0) == [Edit("rather", keep=True)]
    state = steering()
    words = steer(state, "rather")
    assert Edit("rather\nqueued", keep=True) in [
        *state.submit("queued", 1.0, later=True),
        *state.end_agent("It ended.", 1.0),
    ]
    assert state.end_steer(words, False, 1.0) == []


def test_the_arrow_up_takes_back_words_that_wait_for_the_running_turn():
    state = steering()
    words = steer(state, "rather")
    assert state.queue.recall() == [Withdraw()]
    assert state.queue.recall() == []
    assert state.end_steer(words, False, 1.0) == [Edit("rather", keep=True)]
    assert state.queue.recall() == []


def test_what_does_not_steer_waits_for_the_end_of_the_turn():
    for state, text in ((steering(), "/compact"), (ready(), "rather")):
        state.submit("one", 0.0)
        assert state.submit(text, 1.0) == [Edit("")]
        assert state.queue.prompts[-1] == text
    state = steering()
    state.submit("!ls", 1.0)
    assert state.submit("look at it", 1.0) == [Edit("")]


def test_help_tells_the_keys_of_this_agent():
    for state, known in ((steering(), True), (ready(), False)):
        command, words = find_command(state, "/help") or pytest.fail("no help")
        assert ("Alt-Q" in command.run(state, words)[0].block.text) is known


def test_ctrl_c_twice_leaves_and_slowly_does_not():
    state = ready()
    assert state.interrupt("draft", 10.0) == [Edit("")]
    assert state.interrupt("", 15.0) == []
    assert state.interrupt("", 16.0) == [Leave()]


def test_a_turn_that_fails_gives_the_queue_back():
    state = ready()
    state.submit("one", 0.0)
    state.submit("two", 0.0)
    effects = state.fail_turn("The model did not answer.", 1.0)
    assert effects == [Show(Note("The model did not answer.", "error")), Edit("two", keep=True)]
    assert state.phase == "ready"


def test_end_of_the_agent_says_what_to_do_below_a_sentence_of_several_lines():
    state = ready()
    (effect,) = state.end_agent("No model.\n- Run `crow setup`.\nOr go on", 1.0)
    assert effect.block.text == "No model.\n- Run `crow setup`.\nOr go on.\nEnter starts it again."


def test_a_question_rings_when_it_comes_late_and_is_printed_with_its_answer():
    state = ready()
    state.submit("one", 0.0)
    assert any(isinstance(effect, Ring) for effect in ask(state, now=10.0))
    assert state.answer("a", 11.0) == [Wait(PAUSE)]
    printed, answer = state.answer("1", 12.0)
    assert paint(printed) == ["? Run a command · always", "  rm x"]
    assert isinstance(answer, Respond)
    assert answer.response.outcome.option_id == "always"
    assert state.dialog is None


def test_a_form_takes_no_keys_before_a_pause():
    state = ready()
    state.submit("one", 0.0)
    schema = ElicitationSchema(properties={"a": StringPropertySchema(title="A", default="x")})
    request = CreateElicitationRequest(message="Which?", mode="form", session_id="s", requested_schema=schema)
    state.note_key(9.9)
    assert state.ask(1, request, 10.0)[-1] == Wait(PAUSE)
    state.note_key(10.2)
    assert sent(state.submit("typed on", 10.3)) == []
    assert state.queue.prompts == ["typed on"]
    (again,) = state.wake(10.5)
    assert isinstance(again, Wait)
    assert not state.writes_answer
    assert state.wake(10.8) == [Edit("x")]
    assert state.submit("y", 10.9)[0].response.content == {"a": "y"}


def test_questions_wait_for_each_other_and_can_be_withdrawn():
    state = ready()
    state.submit("one", 0.0)
    ask(state, 1)
    ask(state, 2)
    ask(state, 3)
    state.withdraw(2, 10.0)
    assert state.asked == 1
    state.withdraw(1, 10.0)
    assert state.asked == 3
    state.withdraw(3, 10.0)
    assert state.dialog is None


def test_the_end_of_a_turn_closes_its_questions():
    state = ready()
    state.submit("one", 0.0)
    ask(state, 1)
    ask(state, 2)
    effects = state.end_turn(PromptResponse(stop_reason="end_turn"), 11.0)
    assert effects[-2:] == [Respond(1, answer_permission()), Respond(2, answer_permission())]
    assert (state.asked, state.dialog, state.waiting) == (0, None, [])


def test_esc_at_a_question_stops_the_turn():
    state = ready()
    state.submit("one", 0.0)
    ask(state)
    printed, cancel, answer = state.stop(11.0)
    assert paint(printed)[0] == "? Run a command · not answered, as the turn was stopped"
    assert (cancel, answer) == (Cancel(), Respond(1, answer_permission()))


def test_esc_at_a_question_without_a_turn_answers_it():
    state = ready()
    ask(state)
    assert state.stop(11.0)[1:] == [Respond(1, answer_permission())]
    assert state.dialog is None


@pytest.mark.parametrize("at_a_question", [True, False])
def test_call_that_is_cancelled_at_its_question_or_before_it_is_drawn_as_not_run(at_a_question: bool):
    state = ready()
    state.submit("one", 0.0)
    state.receive(ToolCall(tool_call_id="1", title="rm x", status="pending"), 1.0)
    if at_a_question:  # of any agent
        ask(state)
    state.stop(11.0)
    meta = UNSET if at_a_question else {"crow": {"notRun": True}}
    (effect,) = state.receive(ToolCallUpdate(tool_call_id="1", status="failed", meta=meta), 12.0)
    assert paint(effect) == ["○ rm x  not run"]


def test_call_that_ran_when_the_turn_was_cancelled_is_not_drawn_as_not_run():
    state = ready()
    state.submit("one", 0.0)
    state.receive(ToolCall(tool_call_id="2", title="sleep", status="in_progress"), 1.0)
    ask(state)
    state.stop(11.0)
    (effect,) = state.receive(ToolCallUpdate(tool_call_id="2", status="failed"), 12.0)
    assert paint(effect) == ["○ sleep  stopped · 11s"]


def test_of_fifty_calls_that_were_stopped_three_have_a_line():
    state = ready()
    state.submit("one", 0.0)
    calls = [f"{n}" for n in range(50)]
    for call in calls:
        state.receive(ToolCall(tool_call_id=call, title=f"sleep {call}", status="in_progress"), 1.0)
    state.stop(2.0)
    updates = [ToolCallUpdate(tool_call_id=call, status="failed") for call in calls]
    shown = [effect for update in updates[:-1] for effect in state.receive(update, 2.0)]  # the last one says nothing
    assert [*map(paint, shown)] == [[f"○ sleep {n}  stopped · 1.0s"] for n in range(3)]
    more, stop = state.end_turn(PromptResponse(stop_reason="cancelled"), 3.0)
    assert (paint(more), paint(stop)) == (["  47 more calls were stopped · Ctrl-O"], ["! Cancelled."])
    (unfolded,) = state.unfold(3.0)
    assert paint(unfolded) == ["○ sleep 49  did not end · 2.0s"]


def test_changes_of_a_command_that_were_not_answered_are_drawn_as_discarded():
    state = ready()
    state.submit("one", 0.0)
    changes: Any = {"content": [DiffContent(path="/a", new_text="a\n")], "kind": "execute"}
    state.receive(ToolCall(tool_call_id="1", title="touch a", status="in_progress", **changes), 1.0)
    ask(state)
    state.stop(11.0)
    (effect,) = state.receive(ToolCallUpdate(tool_call_id="1", status="failed"), 12.0)
    assert paint(effect) == ["○ rm x  discarded"]


@pytest.mark.parametrize("answered", [True, False])
def test_seconds_of_a_call_do_not_count_while_a_question_about_it_waits(answered: bool):
    state = ready()
    state.submit("one", 0.0)
    for id in ("1", "2"):
        state.receive(ToolCall(tool_call_id=id, title="call", status="in_progress"), 8.0)
    ask(state, 1, 10.0)
    question = CreateElicitationRequest(
        message="Which?",
        mode="form",
        session_id="s",
        tool_call_id="2",
        requested_schema=ElicitationSchema(properties={"a": StringPropertySchema(title="A")}),
    )
    state.ask(2, question, 11.0)
    assert [one.get_seconds(50.0) for one in state.transcript.running.values()] == [2.0, 3.0]
    for id in (1, 2):
        if answered and id == 1:
            state.answer("y", 100.0)
        elif answered:
            state.wake(100.8)
            state.submit("x", 101.0)
        else:
            state.withdraw(3 - id, 99.0 + id)
    assert state.asked == 0
    ended = [state.receive(ToolCallUpdate(tool_call_id=id, status="completed"), 105.0)[0] for id in ("1", "2")]
    assert [round(effect.block.seconds) for effect in ended] == ([7, 7] if answered else [6, 8])


def test_live_output_is_the_last_lines_and_the_number_of_those_before_like_the_finished_block():
    """A line is either shown or counted, however many arrive at once; an empty one is a line."""
    state = ready()
    state.submit("one", 0.0)

    def show(lines: list[str], status: str, before: int = 0) -> list[str]:
        text = "\n".join([*([f"… {before} lines before"] if before else []), *lines])
        content = [BlockContent(content=TextBlock(text=f"```\n{text}\n```"))]
        fields: Any = {"title": "make", "kind": "execute", "status": status, "content": content}
        update = ToolCallUpdate(tool_call_id="1", **fields)
        effects = state.receive(update, 1.0)
        if effects:
            return paint(effects[0])[1:]
        return compose_running(state, 1.0, 80, 24, THEMES["mono"])[1:]

    for count in (1, 6, 7, 90, 400):
        lines = ["" if n % 5 == 3 else str(n) for n in range(1, count + 1)]
        shown = [f"  {line}".rstrip() for line in lines] if count <= 6 else [f"  … {count - 5} lines before"]
        last = [f"  {line}".rstrip() for line in lines[-5:]] if count > 6 else []
        assert show(lines, "in_progress") == [*shown, *last]
    assert show(["a", "b"], "in_progress", before=30) == ["  … 30 lines before", "  a", "  b"]
    finished = [line.replace("└", " ").replace(" · Ctrl-O", "") for line in show([*map(str, range(400))], "completed")]
    assert [line.strip() for line in finished] == ["… 395 lines before", "395", "396", "397", "398", "399"]


@pytest.mark.parametrize(("letter", "text", "meta"), [("n", "why", {"reason": "why"}), ("e", "ls", {"command": "ls"})])
def test_a_reason_and_another_command_go_only_to_agents_that_take_them(letter: str, text: str, meta: dict[str, str]):
    state = ready()
    state.submit("one", 0.0)
    ask(state, raw_input={"command": "rm x"})
    assert isinstance(state.dialog, Question)
    assert len(state.dialog.rows) == 3

    state = ready(abilities=Abilities(answers=("reason", "command")))
    state.submit("one", 0.0)
    ask(state, raw_input={"command": "rm x"})
    state.answer(letter, 11.0)
    assert isinstance(state.dialog, TextDialog)
    assert state.stop(11.5) == [Edit("")]
    assert isinstance(state.dialog, Question)
    state.answer(letter, 12.0)
    answers = [effect for effect in state.submit(text, 12.5) if isinstance(effect, Respond)]
    assert [answer.response.meta for answer in answers] == [{"crow": meta}]


def test_a_form_is_asked_field_by_field():
    state = ready()
    state.submit("one", 0.0)
    fields = {
        "name": StringPropertySchema(title="Name"),
        "sure": BooleanPropertySchema(),
        "tags": MultiSelectPropertySchema(items=MultiSelectItems(type="string", enum=["a", "b", "c"])),
    }
    schema = ElicitationSchema(properties=fields, required=["name", "sure", "tags"])
    request = CreateElicitationRequest(message="Please", mode="form", session_id="s", requested_schema=schema)
    state.ask(1, request, 10.0)
    assert state.wake(10.6) == [Edit("")]
    rows = compose_above(state, 10.6, 80, 24, THEMES["mono"], [])
    assert any("Enter sends · Esc declines" in row for row in rows)
    assert state.submit("", 11.0) == []
    assert state.hint == "This field has to be filled in."
    state.submit("Ada", 11.0)
    state.choose(2, 12.0)
    assert isinstance(state.dialog, ListDialog)
    state.dialog.marked = {0, 2}
    (answer,) = [effect for effect in state.choose(None, 13.0) if isinstance(effect, Respond)]
    assert answer.response.content == {"name": "Ada", "sure": False, "tags": ["a", "c"]}


def test_commands_of_the_user_are_told_with_the_next_prompt():
    state = ready()
    state.submit("!make", 0.0)
    assert state.command == "make"
    state.submit("go on", 1.0)
    output = CommandOutput("make", "ok", 0)
    effects = state.end_command(output, True, 2.0)
    assert [effect.outputs for effect in effects if isinstance(effect, Send)] == [(output,)]
    assert state.queue.outputs == []


def test_a_session_can_be_rewound_to_a_prompt_that_the_agent_lists():
    state = ready(abilities=Abilities(undoes=True))
    assert pick_turn(state) == [ListTurns()]
    offer_turns(state, ["second", "first"])
    assert isinstance(state.dialog, ListDialog)
    assert [row.label for row in state.dialog.rows] == ["second", "first"]
    assert state.choose(2, 1.0) == [TakeBack(2)]
    confirm_taking_back(state, 2, ["a.py  +1 -2"])
    assert isinstance(state.dialog, ListDialog)
    assert (state.dialog.title, state.dialog.searchable) == ("Take back 2 messages, from “first”?", False)
    assert state.choose(state.dialog.find_letter("Y"), 2.0) == [TakeBack(2, confirmed=True)]
    assert state.take_back(2, "Took back.")[-1] == Edit("first")


def test_undo_takes_the_last_turn_and_can_leave_files_that_others_changed():
    state = ready(abilities=Abilities(undoes=True))
    found = find_command(state, "/undo")
    assert found
    assert found[0].run(state, "") == [ListTurns(last=True)]
    assert undo_turn(state, ["second", "first"]) == [TakeBack(1)]
    confirm_taking_back(state, 1, ["a.py  is kept: somebody changed it."], keep=True)
    assert isinstance(state.dialog, ListDialog)
    assert [row.label for row in state.dialog.rows] == ["Take back the rest", "No"]
    assert state.choose(state.dialog.find_letter("n"), 1.0) == []
    assert state.dialog is None
    confirm_taking_back(state, 1, [], keep=True)
    assert state.choose(None, 1.0) == [TakeBack(1, confirmed=True, keep=True)]
    assert undo_turn(state, []) == [Show(Note("There is no turn to take back."))]
    state.commands = [AvailableCommand(name="undo", description="")]
    assert find_command(state, "/undo 2 yes") is None  # the agent has it
    state.abilities = Abilities()
    assert find_command(state, "/undo") is None


def test_lists_are_searched_and_end_with_one_choice():
    state = ready()
    sessions = [SessionInfo(session_id=str(n), cwd="/", title=f"title {n}") for n in range(20)]
    pick_session(state, sessions, datetime.now(UTC))
    assert isinstance(state.dialog, ListDialog)
    state.dialog.search = "title 17"
    assert state.choose(None, 1.0) == [Open("17")]
    assert state.dialog is None


def test_modes_and_models_are_config_options():
    state = ready()
    entries = [SelectEntry(group="fast", name="Fast", options=[SelectEntry(value="a", name="A")])]
    entries.append(SelectEntry(value="b", name="B"))
    state.options.config = [
        SelectConfigOption(id="m", name="Mode", category="mode", current_value="b", options=entries)
    ]
    assert state.options.get_mode() == "B"
    assert state.options.next_mode() == [SetOption("m", "a")]
    assert [type(effect) for effect in pick_option(state, "model")] == [Show]


def test_the_terminal_offers_only_commands_that_the_agent_makes_possible():
    state = ready()
    names = {one.name for one in find_local_commands(state)}
    assert "resume" not in names
    assert "rewind" not in names
    assert find_command(state, "/quit")
    assert find_command(state, "/etc/hosts is what?") is None
    state.receive(AvailableCommandsUpdate(available_commands=[AvailableCommand(name="export", description="")]), 0.0)
    assert find_command(state, "/export") is None


def test_the_footer_fits_and_keeps_what_matters():
    state = ready(folder="/home/somebody/a/long/way/to/project", branch="main")
    entries = [SelectEntry(value="q", name="qwen3-coder")]
    state.options.config = [SelectConfigOption(id="m", name="M", category="model", current_value="q", options=entries)]
    state.submit("one", 0.0)
    state.receive(UsageUpdate(used=12_000, size=128_000), 1.0)
    state.end_turn(PromptResponse(stop_reason="end_turn", usage=Usage(
        total_tokens=110, input_tokens=100, output_tokens=10, cached_read_tokens=54)), 2.0)  # fmt: skip
    wide = compose_footer(state, 5.0, 100, THEMES["mono"])
    assert "qwen3-coder · …" in wide
    assert wide.endswith("9% of 128k · 54% cached")
    state.receive(SessionInfoUpdate(meta={"crow": {"sandbox": "review"}}), 3.0)
    assert "project · main · sandbox: review" in compose_footer(state, 5.0, 120, THEMES["mono"])
    for width in range(10, 120):
        assert measure(compose_footer(state, 5.0, width, THEMES["mono"])) <= width


@pytest.mark.parametrize("width", [19, 29, 39, 79])
def test_the_footer_tells_the_mode_at_any_width(width: int):
    state = ready(folder="/home/somebody/a/long/way/to/project", branch="main", sandbox="sandbox: review")
    model = SelectConfigOption(
        id="m", name="M", category="model", current_value="q", options=[SelectEntry(value="q", name="qwen3-coder-30b")]
    )
    edits = [SelectEntry(value="e", name="Accept edits")]
    mode = SelectConfigOption(id="o", name="O", category="mode", current_value="e", options=edits)
    state.options.config = [model, mode]
    assert "Accept edits" in compose_footer(state, 5.0, width, THEMES["mono"])
    state.receive(UsageUpdate(used=12_000, size=128_000), 1.0)
    footer = compose_footer(state, 5.0, width, THEMES["mono"])
    assert "Accept edits" in footer
    assert measure(footer) <= width
    assert ("sandbox: review" in footer) == (width > 30)


@pytest.mark.parametrize(
    ("time", "shown"),
    [
        ("2026-03-04T12:00:30Z", "just now"),
        ("2026-03-04T11:59:00Z", "2 minutes ago"),
        ("2026-03-04T13:00:00+02:00", "1 hour ago"),
        ("2026-03-04T02:00:00Z", "10 hours ago"),
        ("2026-03-03T14:05:00Z", "yesterday 14:05"),
        ("2026-03-01T09:30:00Z", "Sunday 09:30"),
        ("2026-02-04T09:30:00Z", "2026-02-04"),
        ("soon", "soon"),
        ("", ""),
    ],
)
def test_sessions_are_listed_with_their_age(time: str, shown: str):
    now = datetime.fromisoformat("2026-03-04T12:01:00+00:00")
    assert describe_age(time, now) == shown


@pytest.mark.parametrize("width", [19, 39, 79])
def test_live_rows_fit_the_screen(width: int):
    state = ready(abilities=Abilities(answers=("reason", "command")))
    state.submit("one", 0.0)
    state.submit("a queue of wide 値段 characters " * 5, 0.0)
    for n in range(6):
        state.receive(ToolCall(tool_call_id=str(n), title=f"call {n} \x1b[2J " * 9, status="in_progress"), 1.0)
    state.receive(AgentMessageChunk(content=TextBlock(text="open text")), 2.0)
    ask(state, raw_input={"command": "echo 値段\n" * 40})
    for height in (5, 10, 24):
        lines = compose_above(state, 5.0, width, height, THEMES["mono"], ["tail"])
        assert len(lines) <= max(3, height - 6)
        assert all(measure(line.replace("\x1b[1m", "").replace("\x1b[0m", "")) <= width for line in lines)


def test_files_that_fit_best_come_first():
    files = ["src/parser.py", "docs/parser.md", "tests/test_parser.py", "README.md"]
    assert find_files(files, "pars") == ["src/parser.py", "docs/parser.md", "tests/test_parser.py"]
    assert find_files(files, "srpa") == ["src/parser.py"]
    assert find_files(files, "") == ["README.md", "docs/", "src/", "tests/"]


def test_a_prompt_carries_images_links_and_outputs(tmp_path: Any):
    (tmp_path / "a b.png").write_bytes(b"png")
    (tmp_path / "c.txt").write_text("c")
    folder = str(tmp_path)
    assert [path.name for path in find_images("see 'a b.png' and a\\ b.png, no.png", folder)] == ["a b.png"]
    outputs = [CommandOutput("ls", "```", 2)]
    blocks = make_prompt("see 'a b.png' @c.txt @none", outputs, folder, Abilities(images=True))
    assert [type(block) for block in blocks] == [TextBlock, TextBlock, ImageBlock, ResourceLinkBlock]
    assert "````\n$ ls" in blocks[0].text
    assert len(make_prompt("@c.txt", (), folder, Abilities(name="crow"))) == 1


def test_an_export_is_markdown():
    state = ready()
    state.submit("Fix `it`", 0.0)
    effects = state.receive(AgentMessageChunk(content=TextBlock(text="# Done\n\n- a\n- b\n\n```py\nx\n```\n")), 1.0)
    effects += state.receive(ToolCallUpdate(tool_call_id="1", title="ls", status="completed"), 1.0)
    blocks = [UserPrompt("Fix `it`"), *(effect.block for effect in effects if isinstance(effect, Show))]
    assert to_markdown(blocks, "Title") == (
        "# Title\n\n---\n\n> Fix `it`\n\n# Done\n\n- a\n- b\n\n```py\nx\n```\n\n**ls**\n"
    )


def test_a_new_session_gets_the_model_the_thinking_and_the_mode_of_the_one_before():
    def option(category: str, current: str, *values: str) -> SelectConfigOption:
        entries = [SelectEntry(value=each, name=each) for each in values]
        return SelectConfigOption(id=category, name="", category=category, current_value=current, options=entries)

    before = OfferedOptions(config=[option("mode", "plan", "ask", "plan"), option("model", "gone", "gone", "small")])
    offered = [option("mode", "ask", "ask", "plan"), option("model", "small", "small"), option("other", "a", "a")]
    assert find_changes(before, OfferedOptions(config=offered)) == [SetOption("mode", "plan")]
    assert find_changes(OfferedOptions(), OfferedOptions(config=offered)) == []
    assert find_changes(before, before) == []


def test_any_other_key_makes_the_next_ctrl_c_the_first_again():
    state = ready()
    state.interrupt("", 1.0)
    assert state.hint == "Ctrl-C again leaves."
    state.disarm()
    assert state.hint == ""
    assert state.interrupt("", 1.2) == []
    assert state.interrupt("", 1.4) == [Leave()]


def test_the_cycling_key_reaches_no_mode_that_asks_nothing():
    def cycle(*modes: str) -> list[str]:
        entries = [SelectEntry(value=each, name=each) for each in modes]
        mode = SelectConfigOption(id="mode", name="", category="mode", current_value=modes[0], options=entries)
        options, seen = OfferedOptions(config=[mode]), list[str]()
        for _ in modes:
            for change in options.next_mode():
                mode.current_value = str(change.value)
                seen.append(mode.current_value)
        return seen

    assert cycle("ask", "accept-edits", "plan", "yolo") == ["accept-edits", "plan", "ask", "accept-edits"]
    assert cycle("default", "bypassPermissions", "plan") == ["plan", "default", "plan"]
    assert cycle("yolo", "ask") == ["ask"]
    assert cycle("ask", "Full Access") == []


def test_seconds_belong_to_what_runs_now_and_not_to_the_turn():
    state = ready()
    state.submit("go", 100.0)
    assert "Working… 7s" in compose_spinner(state, 107.0, 80, THEMES["mono"])
    state.receive(ToolCall(tool_call_id="1", title="make", status="in_progress"), 110.0)
    assert compose_spinner(state, 130.0, 80, THEMES["mono"]).endswith(" Running… Esc stops")
    state.receive(ToolCallUpdate(tool_call_id="1", status="completed"), 140.0)
    assert "Working… 2s" in compose_spinner(state, 142.0, 80, THEMES["mono"])
    state.stop(143.0)
    assert compose_spinner(state, 150.0, 80, THEMES["mono"]).endswith("Stopping… 10s · Ctrl-C twice leaves")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("typed", "taken"),
    [("see @my", 'see @"my notes.txt"'), ('see @"my no', 'see @"my notes.txt"'), ("@it's", '@"it\'s.txt"')],
)
async def test_file_with_blanks_in_its_name_is_completed_in_quotes(tmp_path: Path, typed: str, taken: str):
    for name in ("my notes.txt", "it's.txt", "other.txt"):
        (tmp_path / name).write_text("x")
    completer, document = ChatCompleter(State(folder=str(tmp_path)), list, ask_nobody), Document(typed)
    found = [one async for one in completer.get_completions_async(document, CompleteEvent())]
    assert typed[: len(typed) + found[0].start_position] + found[0].text == taken
    content = make_prompt(taken, (), str(tmp_path), Abilities())
    links = [block for block in content if isinstance(block, ResourceLinkBlock)]
    assert [link.name for link in links] == [found[0].display_text[1:]]


async def ask_nobody(text: str) -> list[Any]:
    """Answer as an agent that completes nothing."""
    return []


def offered(state: State, typed: str, *past: str) -> list[str]:
    completer = ChatCompleter(state, lambda: past, ask_nobody)
    return [one.text.strip() for one in completer.complete_command(typed)]


def test_commands_are_offered_in_groups_the_recent_ones_first_and_by_what_they_mean():
    state = ready()
    state.receive(AvailableCommandsUpdate(available_commands=[AvailableCommand(name="dance", description="x")]), 1.0)
    groups = [one.group for one in list_commands(state)]
    assert groups == ["Session"] * 2 + ["Results"] * 3 + ["Screen"] * 3 + ["crow"]
    assert offered(state, "/")[:2] == ["/new", "/quit"]
    assert offered(state, "/", "/theme dark", "hello", "/dance")[:3] == ["/dance", "/theme", "/new"]
    assert offered(state, "/d") == ["/dance", "/details", "/diff"]
    assert offered(state, "/d", "/diff")[0] == "/diff"
    assert offered(state, "/colo") == ["/theme"]
    assert offered(state, "/exi") == ["/quit"]
    assert offered(state, "/nothing") == []
    help, words = find_command(state, "/help") or pytest.fail("no command")
    _, lists = help.run(state, words)
    assert isinstance(lists, Show)
    assert isinstance(lists.block, Prose)
    assert lists.block.text.startswith("- **Session**: `/new` `/quit`\n")


def test_what_a_command_takes_is_offered_and_can_be_typed():
    entries = [SelectEntry(value=each, name=each.title()) for each in ("small", "large", "larger")]
    model = SelectConfigOption(id="m", name="Model", category="model", current_value="small", options=entries)
    state = ready()
    state.open_session(None, [model], 1.0)
    assert offered(state, "/model ") == ["small", "large", "larger"]
    assert offered(state, "/model lar") == ["large", "larger"]
    assert offered(state, "/theme l") == ["light"]
    command, words = find_command(state, "/model large") or pytest.fail("no command")
    assert command.run(state, words) == [SetOption("m", "large")]
    assert command.run(state, "arge") == []
    assert isinstance(state.dialog, ListDialog)
    assert [row.value for row in state.dialog.found] == ["large", "larger"]


def test_a_storm_of_questions_rings_once():
    state = ready()
    state.submit("go", 0.0)
    rung = [effect for n in range(50) for effect in ask(state, id=n + 1, now=20.0 + n / 100)]
    rung += [effect for n in range(50) for effect in state.withdraw(n + 1, 20.6 + n / 100)]
    assert len([effect for effect in rung if isinstance(effect, Ring)]) == 1
    assert any(isinstance(effect, Ring) for effect in ask(state, id=99, now=30.0))


def test_the_card_of_the_first_run_has_five_lines_that_fit(tmp_path: Path):
    file = tmp_path / "prompts.txt"
    assert is_first_run(lambda: str(file))
    assert end_first_run(lambda: str(file))
    assert not is_first_run(lambda: str(file))
    assert not is_first_run(lambda: None)
    assert not end_first_run(lambda: None)
    for mode in ("ask", "accept-edits", "plan", "yolo", "other"):
        option = SelectConfigOption(id="m", name="", category="mode", current_value=mode, options=[])
        rows = Painter(THEMES["mono"]).paint(Prose(make_card(OfferedOptions(config=[option]))), 79)
        assert len(rows) == 5, rows


@pytest.mark.parametrize("output", ["", "out\nput", "```\ncode\n```", "$ a\n````\n"])
@pytest.mark.parametrize("code", [0, 3])
def test_commands_that_the_agent_was_told_of_are_shown_as_commands_when_a_session_is_loaded(output: str, code: int):
    told = "".join(describe_output(command, output, code) for command in ("make", "ls"))
    state = ready()
    chunks = [UserMessageChunk(content=TextBlock(text=text), message_id="1") for text in (told, "so?")]
    state.receive(chunks[0], 1.0)
    state.receive(chunks[1], 1.0)
    shown = [effect.block for effect in state.end_turn(END, 1.0) if isinstance(effect, Show)]
    assert shown == [
        *(CommandOutput(command, output.rstrip(), code) for command in ("make", "ls")),
        UserPrompt("so?"),
    ]


def test_plan_is_shown_without_the_call_that_made_it():
    state = ready()
    state.submit("one", 0.0)
    state.receive(ToolCall(tool_call_id="1", title="plan(1 entries)", kind="think", status="in_progress"), 1.0)
    state.receive(PlanUpdate(entries=[PlanEntry(content="bake", priority="medium", status="pending")]), 1.0)
    assert state.receive(ToolCallUpdate(tool_call_id="1", status="completed"), 1.0) == []
    (shown,) = [effect for effect in state.end_turn(END, 2.0) if isinstance(effect, Show)]
    assert paint(shown) == ["Plan", "  ○ bake"]


def test_the_cost_stays_when_an_update_has_none():
    state = ready()
    state.receive(UsageUpdate(used=1, size=10, cost=Cost(amount=2.0, currency="USD")), 0.0)
    state.receive(UsageUpdate(used=5, size=10), 0.0)
    assert describe_usage(state) == ["50% of 10", "$2.00"]


def test_a_goal_at_its_limit_says_how_to_go_on_itself():
    meta = {"crow": {"stopped": {"by": "goal", "reason": "…"}}}
    assert not describe_stop(PromptResponse(stop_reason="max_turn_requests", meta=meta))


def test_keys_that_can_do_nothing_say_why_without_a_line_that_stays():
    state = ready()
    assert state.unfold(5.0) == []
    assert state.hint == "Nothing is folded."
    assert state.submit("!", 6.0) == [Edit("")]
    assert state.hint == "Write a command after the `!`."


@pytest.mark.parametrize(("status", "lines"), [("completed", 0), ("pending", 2)])
def test_a_plan_is_printed_at_the_end_of_a_turn_unless_all_of_it_is_done(status: Any, lines: int):
    state = ready()
    state.receive(PlanUpdate(entries=[PlanEntry(content="bake", priority="high", status=status)]), 1.0)
    shown = state.end_turn(PromptResponse(stop_reason="end_turn"), 2.0)
    assert sum(len(paint(effect)) for effect in shown) == lines
