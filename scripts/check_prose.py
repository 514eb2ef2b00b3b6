"""Find sentences that are hard to read, in pages and docstrings, and print the figures of each file.

    uv run scripts/check_prose.py                    # the figures of every page
    uv run scripts/check_prose.py README.md          # and each fault of some files

The rules: at most 30 words a sentence; at most two of "that" and "which"; no sentence that opens with What, Which,
Whether, How, Where or Who, unless it is a question; none of the forms below.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_WORDS, MOST_RELATIVES = 30, 2
OPENING = re.compile(r"(What|Which|Whether|How|Where|Who)\b")
RELATIVE = re.compile(r"\b(that|which)\b", re.I)
FORMS = {
    "of which": r"\bof which\b",
    "is no": r"(?<!there )\b(?:is|are|was|were) no (?!longer|more)",
    "what is done": r"\bwhat (?:is|was|are) (?:\w{2,}(?:ed|en)|sent|kept|read|run)\b",
    "mend": r"\bmend(?:s|ed|ing)?\b",
    "beside": r"\bbeside\b",
    "a change of": r"\bchanges? of\b",
}
"""Forms that sound translated, with their patterns."""


def split_sentences(text: str) -> Iterator[str]:
    """Yield the sentences of Markdown without code, addresses and headings; each cell of a table is one of its own."""
    text = re.sub(r"^ *```.*?^ *```|<!--.*?-->|^#.*?$", "", text, flags=re.M | re.S)
    text = re.sub(r"(`+)(?!`)(?:(?!\n\s*\n).)+?(?<!`)\1(?!`)", "CODE", text, flags=re.S)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^ *\|?[ :|-]+\|?$", "", text, flags=re.M)
    for part in re.split(r"\n\s*\n|^ *(?:[-*]|\d+\.) |\|| · |^ *\w+:$", text, flags=re.M):
        words = " ".join(part.split()).replace("**", "")
        yield from filter(None, re.split(r"(?<=[.!?])\)? +(?=[\"(]?(?:[A-Z]|crow\b))", words))


def find_faults(sentence: str) -> list[str]:
    """Return the rules that a sentence breaks."""
    faults: list[str] = []
    count = len(sentence.split())
    faults += [f"{count} words"] if count > MOST_WORDS else []
    relatives = len(RELATIVE.findall(sentence))
    faults += [f"{relatives} of that/which"] if relatives > MOST_RELATIVES else []
    opening = OPENING.match(sentence)
    faults += [f"opens with {opening[1]}"] if opening and not sentence.rstrip(')"').endswith("?") else []
    return faults + [form for form, pattern in FORMS.items() if re.search(pattern, sentence, re.I)]


def read_prose(file: Path) -> str:
    """Return a page, or the docstrings of a Python file and the texts below its fields and in its hooks."""
    text = file.read_text("utf-8")
    if file.suffix != ".py":
        return text
    return "\n\n".join(read_docstrings(ast.parse(text)))


def read_docstrings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield drop_examples(node.value.value)
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call):  # a hook and its contract
            for value in node.value.args:
                if isinstance(value, ast.Constant) and isinstance(value.value, str) and "\n" in value.value:
                    yield drop_examples(value.value)


def drop_examples(text: str) -> str:
    """Remove indented code, which follows an empty line or a line that ends with a colon."""
    lines = text.expandtabs().splitlines()
    margin = min((len(line) - len(line.lstrip()) for line in lines[1:] if line.strip()), default=0)
    return "\n".join(line for line in lines if not line.startswith(" " * (margin + 4)))


def check_file(file: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each faulty sentence of a file with its faults."""
    for sentence in split_sentences(read_prose(file)):
        if faults := find_faults(sentence):
            yield sentence, faults


def measure(file: Path) -> str:
    """Return the figures of a file. Cells and fragments, which end without a full stop, do not count as sentences."""
    sentences = [one for one in split_sentences(read_prose(file)) if one.endswith((".", "?", "!", ":"))]
    counts = [len(one.split()) for one in sentences] or [0]
    share = sum(count > MOST_WORDS for count in counts) / len(counts)
    faults = sum(1 for _ in check_file(file))
    return f"{len(sentences):5} sentences, {sum(counts) / len(counts):4.1f} words, {share:4.0%} long, {faults:3} faults"


def main(names: list[str]) -> None:
    patterns = ("*.md", "docs/**/*.md", "crow-*/README.md")
    files = [Path(name) for name in names] or [file for each in patterns for file in sorted(ROOT.glob(each))]
    for file in files:
        print(f"{measure(file)}  {file}")
        for sentence, faults in check_file(file) if names else ():
            print(f"    {', '.join(faults)}: {sentence}")


if __name__ == "__main__":
    main(sys.argv[1:])
