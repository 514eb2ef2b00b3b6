"""Corrections: sentences of a user, in English, that tell an agent to work in another way."""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

SENTENCES_LIMIT = 6
"""Sentences of a message that are looked at, from its beginning."""
LENGTH_LIMIT = 300
"""Characters of the longest sentence that is looked at: longer ones are pasted."""

TEXT_LIMIT = 4_000
"""Characters of a message that are looked at, from its beginning."""

FENCED = re.compile(
    r"```.*?(?:```|\Z)|~~~.*?(?:~~~|\Z)|^[ \t]*>[^\n]*$|<(\w[\w-]*)[^>]*>.*?</\1>", re.DOTALL | re.MULTILINE
)
"""Code, quotations and attachments, which are not the user's words."""
SENTENCE_END = re.compile(r"(?<=[.!?])[\"')]*\s+|\s*\n+\s*")
DATA = tomllib.loads((Path(__file__).parent / "corrections.toml").read_text("utf-8"))
FILLER = re.compile(rf"(?:{'|'.join(DATA['fillers'])})\b[,.!:]*\s+")
SETTLED = "|".join(DATA["settled"])
NO = r"(?:no+|nope|nah)"
DENIAL = re.compile(
    rf"{NO}(?:[\s,]+{NO})*(?:(?:\s*[,.!:;—–-])+(?!\s*(?:[,.!:;—–-]|(?:{SETTLED})\b))"
    r"|(?=\s+(?:i (?:meant|said|wanted)|use|don'?t|do not|keep|leave|not)\b))"
)
"""A "no" with a pause, or before an instruction."""
BARE_DENIAL = re.compile(rf"{NO}(?:[\s,]+{NO})*[.!]*")
OPENERS = [re.compile(pattern) for pattern in DATA["openers"]]
"""Beginnings of sentences that say that something is not as it should be."""
DIRECT = [re.compile(pattern) for pattern in DATA["direct"]]
"""Sentences that say how to work, or prohibit something."""
REWRITES = [(re.compile(pattern, re.IGNORECASE), str(line)) for pattern, line in DATA["rewrites"]]
"""The beginnings of sentences, and their form in a line of instructions."""
LAST_WORDS = re.compile(r"[\s,]+(?:please|pls|thanks|thank you|ok|okay|again|already)(?=[.!]*$)", re.IGNORECASE)
VAGUE = re.compile(rf"\b(?:{'|'.join(DATA['vague'])})\b", re.IGNORECASE)
"""Words that mean nothing without the conversation before."""
INSTRUCTS = re.compile(r"you\b|i'?d\b|i would\b|i prefer\b")
"""Beginnings whose whole sentence becomes a line."""
REGRETS = re.compile(r"i (?:didn?|never|only|just)\b|undo|revert|roll|take back")
"""Beginnings whose sentence says nothing about what to do."""


@dataclass(frozen=True)
class Correction:
    """A correction in a message of the user."""

    quote: str
    """The words of the user."""
    line: str
    """A line of instructions made of them; "" if they mean nothing without the conversation."""


def find_correction(text: str) -> Correction | None:
    """Return the first correction in a message of the user, or None."""
    sentences = list_sentences(text)
    for at, sentence in enumerate(sentences):
        start = skip_fillers(sentence)
        lower = sentence[start:].lower().replace("’", "'")
        following = sentences[at + 1] if at + 1 < len(sentences) else ""
        if BARE_DENIAL.fullmatch(lower):
            if following and not is_question(following) and not re.match(rf"(?:{SETTLED})\b", following.lower()):
                return make_correction(f"{sentence} {following}", following)
            continue
        if denial := DENIAL.match(lower):
            return make_correction(sentence, sentence[start + denial.end() :])
        if lower.startswith("why "):
            if any(pattern.match(lower) for pattern in DIRECT) and following and not is_question(following):
                return make_correction(f"{sentence} {following}", following)
            continue
        if is_question(sentence):
            continue
        for pattern in OPENERS:
            if found := pattern.match(lower):
                return make_correction_after(sentence, start, found.end(), following)
        if any(pattern.match(lower) for pattern in DIRECT):
            if re.fullmatch(r"stop[.!]*", lower):
                return make_correction(f"{sentence} {following}".strip(), following)
            return make_correction(sentence, sentence[start:])
    return None


def make_correction_after(sentence: str, start: int, end: int, following: str) -> Correction:
    """Make a correction of a sentence whose beginning says that something is wrong."""
    said = sentence[start:]
    rest = "" if REGRETS.match(said.lower()) else said if INSTRUCTS.match(said.lower()) else said[end:]
    if make_line(rest) or not following or is_question(following):
        return make_correction(sentence, rest)
    return make_correction(f"{sentence} {following}", following)


def make_correction(quote: str, instruction: str) -> Correction:
    return Correction(quote.strip(), make_line(instruction))


def make_line(instruction: str) -> str:
    """Make a line of instructions of a sentence; "" if it means nothing without the conversation."""
    line = instruction.strip(" ,;:-–—")
    line = LAST_WORDS.sub("", line[skip_fillers(line) :])
    for pattern, replacement in REWRITES:
        line = pattern.sub(replacement, line)
    line = line.strip(" ,;:-.!")
    if len(line.split()) < 2 or VAGUE.search(line):
        return ""
    return f"{line[0].upper()}{line[1:]}."


def list_sentences(text: str) -> list[str]:
    """List the first sentences of a message that the user has written."""
    return list(islice(split_sentences(FENCED.sub("\n", text[:TEXT_LIMIT])), SENTENCES_LIMIT))


def split_sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text that are not too long."""
    for sentence in SENTENCE_END.split(text):
        if (sentence := sentence.strip()) and len(sentence) <= LENGTH_LIMIT:
            yield sentence


def skip_fillers(sentence: str) -> int:
    """Return where a sentence begins behind words such as "please"."""
    lower, at = sentence.lower(), 0
    while found := FILLER.match(lower, at):
        at = found.end()
    return at


def is_question(sentence: str) -> bool:
    return sentence.rstrip("\"')").endswith("?")
