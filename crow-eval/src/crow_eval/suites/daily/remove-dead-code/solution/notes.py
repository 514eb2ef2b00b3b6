"""Notes in a file, one a line: notes.py COMMAND [ARGUMENT]."""

import sys
from pathlib import Path

import text
from text import clean, count_words

FILE = Path("notes.txt")
STYLES = {"titles": "as_title", "shout": "as_shout"}


class Notes:
    def __init__(self):
        self.lines = FILE.read_text("utf-8").splitlines() if FILE.exists() else []

    def save(self):
        FILE.write_text("".join(f"{line}\n" for line in self.lines), "utf-8")

    def do_add(self, note):
        self.lines.append(clean(note))
        self.save()
        print("added", self.lines[-1])

    def do_list(self):
        for number, line in enumerate(self.lines, 1):
            print(number, line)

    def do_remove(self, number):
        print("removed", self.lines.pop(int(number) - 1))
        self.save()

    def do_count(self):
        print(f"{len(self.lines)} notes, {sum(count_words(line) for line in self.lines)} words")

    def do_export(self):
        for line in self.lines:
            print(text.bullet(line))

    def show(self, style):
        for line in self.lines:
            print(getattr(text, style)(line))


def main():
    command, *arguments = sys.argv[1:]
    notes = Notes()
    if command in STYLES:
        notes.show(STYLES[command])
    elif method := getattr(notes, f"do_{command}", None):
        method(*arguments)
    else:
        commands = [name.removeprefix("do_") for name in dir(notes) if name.startswith("do_")]
        print("commands:", *sorted([*commands, *STYLES]))


if __name__ == "__main__":
    main()
