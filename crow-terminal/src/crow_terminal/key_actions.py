"""The actions of the keys: what each does to the state and to the editor."""

import time

from prompt_toolkit.buffer import Buffer

from crow_terminal import effects
from crow_terminal.chat_base import ChatBase, get_time
from crow_terminal.dialogs import ListDialog
from crow_terminal.local_commands import LocalCommand, find_command
from crow_terminal.pickers import pick_option, pick_prompt
from crow_terminal.prompt_content import find_pasted_image
from crow_terminal.question import Question

PASTE_LINES = 8
"""Lines of a paste above which only its size is shown in the editor."""
PASTE_LENGTH = 2_000
"""The same in characters."""


class KeyActions(ChatBase):
    """The part of the terminal that the keys call; see `key_bindings.Actions`."""

    def is_choosing(self) -> bool:
        return self.state.chooses

    def is_asking(self) -> bool:
        return isinstance(self.state.dialog, Question)

    def can_scroll(self) -> bool:
        return self.state.question is not None

    def is_answering(self) -> bool:
        return self.is_asking() and not self.terminal.editor.text and self.state.pause.came_before()

    def note_key(self) -> None:
        self._completes = False
        if wanted := self.state.note_key(get_time()):
            self.perform(wanted)

    def wake(self) -> None:
        """Answer by the letter that was typed alone, which leaves the prompt; else look again whether keys answer."""
        now, editor = get_time(), self.terminal.editor
        letters = self.state.take_letters(now)
        if letters and editor.document.text_before_cursor.endswith(letters):
            came_too_early = editor.text.strip(letters) == ""
            editor.delete_before_cursor(len(editor.text) if came_too_early else len(letters))
            self.perform(self.state.answer(letters, now))
        self.perform(self.state.wake(now))

    def type_letter(self, text: str) -> None:
        if text.isprintable():
            before = self.terminal.editor.text
            has_words = before.strip(text) and before != self.state.pause.followed
            self.terminal.editor.insert_text(text)
            self.perform([] if has_words else self.state.note_letter(text))

    def confirm(self) -> None:
        letters, text = self.state.pause.followed, self.terminal.editor.text
        if letters and text.strip(letters) == "":
            self.terminal.set_text("")
            self.perform(self.state.answer(letters, get_time()))
        elif self.is_answering():
            self.choose(None)
        elif text:
            self.submit()

    def scroll(self, pages: int) -> None:
        self.perform(self.state.scroll(pages))

    def can_recall(self) -> bool:
        return bool(self.state.queue) and not self.terminal.editor.text and not self.is_choosing()

    def submit(self, *, later: bool = False) -> None:
        text = self.expand(self.terminal.editor.text)
        now = get_time()
        if not self.state.writes_answer:
            if text.strip():
                self.terminal.editor.history.append_string(text)
            if found := find_command(self.state, text.strip()):
                self.terminal.set_text("")
                self._run_local(*found)
                return
        self.perform(self.state.submit(text, now, later=later))
        self.pastes.clear()

    def run_local(self, name: str) -> None:
        """Run a command of the terminal without words, if this agent makes it possible."""
        if found := find_command(self.state, f"/{name}"):
            self._run_local(*found)

    def _run_local(self, command: LocalCommand, words: str) -> None:
        if self.state.phase == "working" and not command.works_in_turn:
            self.state.show_hint("Stop the turn first: Esc.", get_time())
            self.terminal.update()
        else:
            self.perform(command.run(self.state, words))

    def expand(self, text: str) -> str:
        """Replace the words that stand for pastes by the pasted texts."""
        for words, pasted in self.pastes.items():
            text = text.replace(words, pasted)
        return text

    def move(self, delta: int) -> None:
        self.perform(self.state.move(delta))

    def choose(self, number: int | None) -> None:
        self.perform(self.state.choose(number, get_time()))

    def type_in_list(self, text: str) -> None:
        """Handle a letter while a list is shown: part of a search, or the number of a row."""
        dialog = self.state.dialog
        if not isinstance(dialog, ListDialog):
            return
        if dialog.searchable:
            dialog.search = dialog.search + text if text else dialog.search[:-1]
            dialog.selected = 0
        elif number := dialog.find_letter(text):
            self.choose(number)
        elif text == " " and dialog.marked is not None:
            dialog.marked ^= {dialog.selected}
        elif text.isdecimal() and 0 < int(text) <= len(dialog.rows):
            if dialog.marked is not None:
                dialog.marked ^= {int(text) - 1}
            elif self.state.asked:
                dialog.selected = int(text) - 1  # Enter takes it
            else:
                self.choose(int(text))
        self.terminal.update()

    def stop(self) -> None:
        editor = self.terminal.editor
        if editor.complete_state:
            editor.cancel_completion()
        else:
            self.perform(self.state.stop(get_time()))

    def interrupt(self) -> None:
        self._is_interrupting = True
        self.perform(self.state.interrupt(self.terminal.editor.text, get_time()))

    def end_input(self) -> None:
        self.perform([effects.Leave()])

    def recall(self) -> None:
        self.perform(self.state.queue.recall())

    def unfold(self) -> None:
        self.perform(self.state.unfold(get_time()))

    def fold_thoughts(self) -> None:
        self.state.fold_thoughts = not self.state.fold_thoughts
        self.state.show_hint(f"Thoughts are {'hidden' if self.state.fold_thoughts else 'shown'}.", time.monotonic())
        self.perform([effects.Fold(thoughts=self.state.fold_thoughts)])

    def can_send_to_background(self) -> bool:
        return self.state.phase == "working" or not self.terminal.editor.text

    def send_to_background(self) -> None:
        self.perform(self.state.send_to_background(get_time()))

    def next_mode(self) -> None:
        self.perform(self.state.options.next_mode())

    def pick_model(self) -> None:
        self.perform(pick_option(self.state, "model"))

    def choose_former_model(self) -> None:
        self.perform(self.state.options.choose_former_model() or pick_option(self.state, "model"))

    def search_history(self) -> None:
        self.perform(pick_prompt(self.state, self.terminal.editor.history.get_strings()))

    def end_key(self) -> None:
        """Note that a key was handled: any but Ctrl-C makes the next Ctrl-C the first again."""
        if not self._is_interrupting:
            self.state.disarm()
        self._is_interrupting = False

    def paste(self, text: str) -> None:
        """Insert a paste; a long one, or the path of an image, as words that stand for it."""
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        lines = len(text.splitlines())
        writes_prompt = not (self.state.writes_answer or self.state.chooses)
        if writes_prompt and not text:
            self.paste_image()  # terminals paste an image as nothing
        elif writes_prompt and self.state.abilities.images and (path := find_pasted_image(text, self.settings.cwd)):
            words = self._name_image()
            self.pastes[words], text = path, words
        elif lines > PASTE_LINES or len(text) > PASTE_LENGTH:
            words = f"[paste {len(self.pastes) + 1}: {lines} lines]"
            self.pastes[words], text = text, words
        self.terminal.editor.insert_text(text)

    def paste_image(self) -> None:
        """Insert words that stand for the image in the clipboard."""
        if self.state.writes_answer or self.state.chooses:
            return
        if self.state.abilities.images or self.state.phase == "starting":
            self._start(self._paste_image())
        else:
            self.state.show_hint("This agent takes no images.", time.monotonic())
            self.terminal.update()

    async def _paste_image(self) -> None:
        from crow_terminal.clipboard import NoImage, read_clipboard

        try:
            image = await read_clipboard()
        except NoImage as reason:
            self.state.show_hint(str(reason), time.monotonic())
        else:
            words = self._name_image()
            self.images[words] = image
            if self._draft is None:
                self.terminal.editor.insert_text(words)
            else:
                self._draft += words  # a question took the editor meanwhile
        self.terminal.update()

    def _name_image(self) -> str:
        self._image_count += 1
        return f"[image {self._image_count}]"

    def complete(self) -> None:
        editor = self.terminal.editor
        if editor.complete_state and editor.complete_state.completions:
            self._mark_next(editor)
        else:
            self._completes = True
            editor.start_completion()  # unless it looks for some already

    def note_completions(self, editor: Buffer) -> None:
        """Mark the first completion, if Tab was pressed before there was one."""
        if self._completes and editor.complete_state and editor.complete_state.completions:
            self._completes = False
            self._mark_next(editor)

    def _mark_next(self, editor: Buffer) -> None:
        """Mark the next completion. The only file there is needs no Enter to be taken."""
        editor.complete_next()
        if not editor.text.startswith("/") and editor.complete_state and len(editor.complete_state.completions) == 1:
            editor.complete_state = None

    def apply_completion(self) -> bool:
        editor = self.terminal.editor
        completing = editor.complete_state
        if completing is None or not completing.completions:
            return False
        chosen = completing.current_completion
        if chosen:
            editor.complete_state = None
            return not editor.text.startswith("/") or editor.text.endswith(" ")
        first = completing.completions[0]
        typed = editor.document.text_before_cursor
        if typed.startswith("/") and " " not in typed and first.text.strip() != typed:
            editor.apply_completion(first)
            return first.text.endswith(" ")
        return False

    def edit_outside(self) -> None:
        self._start(self._edit_outside())

    async def _edit_outside(self) -> None:
        from crow_terminal.outside import edit

        text = await edit(self.expand(self.terminal.editor.text))
        if isinstance(text, str):
            self.terminal.set_text(text)
        self.terminal.update()
