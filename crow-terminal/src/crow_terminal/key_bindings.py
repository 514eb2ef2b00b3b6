"""The keys: each is passed on as an action."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from prompt_toolkit.application import get_app
from prompt_toolkit.filters import Condition, Filter, has_completions
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys


class Actions(Protocol):
    """The actions of keys."""

    def is_choosing(self) -> bool:
        """True if a list is shown to choose from, in place of the editor."""
        ...

    def is_asking(self) -> bool:
        """True if a question for permission is shown, above the editor."""
        ...

    def is_answering(self) -> bool:
        """True if the arrows belong to it: after a pause, while the editor is empty."""
        ...

    def can_scroll(self) -> bool:
        """True if a question for permission is shown, also while its answer is being written."""
        ...

    def can_recall(self) -> bool:
        """True if the arrow up takes back a prompt of the queue, or words that wait for the running turn."""
        ...

    def submit(self, *, later: bool = False) -> None: ...
    def move(self, delta: int) -> None: ...
    def choose(self, number: int | None) -> None: ...
    def type_in_list(self, text: str) -> None: ...
    def type_letter(self, text: str) -> None:
        """Type a letter into the prompt, which may answer a question."""
        ...

    def confirm(self) -> None:
        """Handle Enter while a question is shown."""
        ...

    def scroll(self, pages: int) -> None: ...
    def stop(self) -> None: ...
    def interrupt(self) -> None: ...
    def end_input(self) -> None: ...
    def recall(self) -> None: ...
    def unfold(self) -> None: ...
    def can_send_to_background(self) -> bool:
        """True if Ctrl-B is not for the editor: a turn runs, or the editor is empty."""
        ...

    def send_to_background(self) -> None: ...
    def fold_thoughts(self) -> None: ...
    def next_mode(self) -> None: ...
    def pick_model(self) -> None: ...
    def choose_former_model(self) -> None:
        """Choose the model that was used before; list the models if there is none."""
        ...

    def run_local(self, name: str) -> None:
        """Run a command of the terminal."""
        ...

    def search_history(self) -> None: ...
    def paste(self, text: str) -> None: ...
    def paste_image(self) -> None: ...
    def edit_outside(self) -> None: ...
    def complete(self) -> None:
        """Mark the next completion, or the first one once there is one."""
        ...

    def apply_completion(self) -> bool:
        """Take the marked completion, or the only one. Return whether Enter is used up by that."""
        ...


def make_bindings(actions: Actions) -> KeyBindings:
    keys = KeyBindings()
    choosing = Condition(actions.is_choosing)
    writing = ~choosing
    asking, answering = Condition(actions.is_asking), Condition(actions.is_answering)
    recalling = Condition(actions.can_recall)

    def bind(*names: str, act: Callable[[], object], filter: Filter | None = None, eager: bool = False) -> None:
        @keys.add(*names, filter=filter if filter is not None else True, eager=eager)
        def _(event: KeyPressEvent) -> None:  # pyright: ignore[reportUnusedFunction]
            act()

    bind("up", act=lambda: actions.move(-1), filter=choosing)
    bind("c-p", act=lambda: actions.move(-1), filter=choosing)
    bind("down", act=lambda: actions.move(1), filter=choosing)
    bind("c-n", act=lambda: actions.move(1), filter=choosing)
    bind("tab", act=lambda: actions.move(1), filter=choosing)
    bind("s-tab", act=lambda: actions.move(-1), filter=choosing)
    bind("enter", act=lambda: actions.choose(None), filter=choosing, eager=True)
    bind("backspace", act=lambda: actions.type_in_list(""), filter=choosing)

    @keys.add(Keys.Any, filter=choosing)
    def _(event: KeyPressEvent) -> None:  # pyright: ignore[reportUnusedFunction]
        if event.data.isprintable():
            actions.type_in_list(event.data)

    @keys.add("enter", filter=writing)
    def _(event: KeyPressEvent) -> None:  # pyright: ignore[reportUnusedFunction]
        if not actions.apply_completion():
            actions.submit()

    def new_line() -> None:
        get_app().current_buffer.insert_text("\n")

    @keys.add(Keys.Any, filter=asking)
    def _(event: KeyPressEvent) -> None:  # pyright: ignore[reportUnusedFunction]
        actions.type_letter(event.data)

    @keys.add("c-u", filter=asking)
    def _(event: KeyPressEvent) -> None:  # pyright: ignore[reportUnusedFunction]
        event.app.clipboard.set_text(event.current_buffer.text)  # Ctrl-Y brings it back
        event.current_buffer.text = ""

    bind("enter", act=actions.confirm, filter=asking & ~has_completions)
    for name, delta in (("up", -1), ("c-p", -1), ("s-tab", -1), ("down", 1), ("c-n", 1), ("tab", 1)):
        bind(name, act=partial(actions.move, delta), filter=answering)
    for name, pages in (("pageup", -1), ("pagedown", 1)):
        bind(name, act=partial(actions.scroll, pages), filter=Condition(actions.can_scroll))
    for name, pages in (("left", -1), ("right", 1)):
        bind(name, act=partial(actions.scroll, pages), filter=answering)
    bind("tab", act=actions.complete, filter=writing & ~answering)
    bind("escape", "enter", act=new_line, filter=writing)
    bind("c-j", act=new_line, filter=writing)
    bind("up", act=actions.recall, filter=recalling & ~answering)
    bind("escape", act=actions.stop)
    bind("c-c", act=actions.interrupt)
    bind("c-d", act=actions.end_input, filter=Condition(lambda: not get_app().current_buffer.text))
    bind("c-o", act=actions.unfold)
    bind("c-t", act=actions.fold_thoughts)
    bind("s-tab", act=actions.next_mode, filter=writing & ~has_completions & ~asking)
    bind("escape", "q", act=lambda: actions.submit(later=True), filter=writing)
    bind("escape", "m", act=actions.pick_model, filter=writing)
    bind("f2", act=actions.choose_former_model, filter=writing)
    for letter, name in (("n", "new"), ("r", "resume"), ("u", "undo")):
        bind("escape", letter, act=partial(actions.run_local, name), filter=writing)
    bind("c-r", act=actions.search_history, filter=writing)
    bind("c-g", act=actions.edit_outside, filter=writing)
    bind("c-b", act=actions.send_to_background, filter=writing & Condition(actions.can_send_to_background))
    bind("c-v", act=actions.paste_image, filter=writing)
    bind("c-z", act=lambda: get_app().suspend_to_background())

    @keys.add(Keys.BracketedPaste)
    def _(event: KeyPressEvent) -> None:  # pyright: ignore[reportUnusedFunction]
        if not actions.is_choosing():
            actions.paste(event.data)

    return keys
