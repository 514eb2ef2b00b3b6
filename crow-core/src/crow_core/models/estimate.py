"""Estimate the size of messages without a tokenizer."""

import re
from typing import Any

WORD = re.compile(r"[^\W\d_]+")


def count_min_tokens(messages: list[dict[str, Any]]) -> int:
    """Count the tokens that messages have at least, in any language and with any usual tokenizer.

    A word counts as one token, since no usual tokenizer joins two; a long word, or a run of letters in a script without
    spaces, counts as several. Tools and images do not count: their tokens depend on the server.
    """
    texts = list_texts(messages)
    words = sum(1 + len(word) // (16 if word.isascii() else 6) for text in texts for word in WORD.findall(text))
    characters = sum(len(re.sub(r"(\W)\1{3,}", r"\1", text)) for text in texts)
    return max(words, characters // 10)


def count_text_characters(messages: list[dict[str, Any]]) -> int:
    """Count the characters of the texts and of the tool calls' arguments."""
    return sum(map(len, list_texts(messages)))


def list_texts(messages: list[dict[str, Any]]) -> list[str]:
    """List the texts of messages, and the arguments of their tool calls."""
    texts: list[str] = []
    for message in messages:
        content = message.get("content") or ""
        texts += [content] if isinstance(content, str) else [part.get("text") or "" for part in content]
        for use in message.get("tool_calls") or ():
            texts.append(use["function"]["arguments"])
    return texts
