"""Scripts of sed, awk and jq that only read what they are given: no command, no other file, no variable of the
environment. Whatever is not recognised here may do more.
"""

import re

SED_ADDRESS = re.compile(r"\s*(\d+(~\d+)?|\$|/)")
SED_SIMPLE = re.compile(
    r"[pPdDgGhHxnNFz=](?=\s*($|[;}\n]))|[lqQ]\s*\d*(?=\s*($|[;}\n]))|[:btT]\s*\w*(?=\s*($|[;}\n]))|[aic]\s[^\n\\]*(?=\n|$)"
)
SED_FLAGS = re.compile(r"[gpiIM0-9]*(?=\s*($|[;}\n]))")
SED_BETWEEN = re.compile(r"[\s;{}]*")
AWK_MORE = re.compile(r"system|getline|(?<!\|)\|(?!\|)|\|\|\||@|ENVIRON|ARGV|PROCINFO|\\\n|close|fflush|load|include")
JQ_MORE = re.compile(r"\benv\b|\$ENV\b|\b(import|include|input_filename|modulemeta|get_search_list)\b|\$__")


def only_reads(language: str, script: str) -> bool:
    """Test whether a script in this language only reads its input and prints."""
    if language == "sed":
        return is_plain_sed(script)
    if language == "awk":
        return not AWK_MORE.search(script) and not (">" in script and "print" in script)
    return not JQ_MORE.search(script)


def is_plain_sed(script: str) -> bool:
    """Test whether a script of sed has only commands that change or print lines."""
    at = 0
    while (at := match_end(SED_BETWEEN, script, at)) < len(script):
        at = skip_addresses(script, at)
        if at < 0 or at >= len(script):
            return False
        if script[at] == "{":
            continue
        if script[at] in "sy":
            kind, delimiter = script[at], script[at + 1 : at + 2]
            at = skip_text(script, at + 2, delimiter)
            at = skip_text(script, at, delimiter) if at >= 0 else at
            found = SED_FLAGS.match(script, at) if at >= 0 else None
            if found is None or (kind == "y" and found[0]):
                return False
            at = found.end()
        elif found := SED_SIMPLE.match(script, at):
            at = found.end()
        else:
            return False
    return True


def skip_addresses(script: str, at: int) -> int:
    """Return the position after the addresses of a command; -1 if they are not known."""
    for _ in range(2):
        found = SED_ADDRESS.match(script, at)
        if found is None:
            break
        at = found.end()
        if found[1] == "/":
            at = skip_text(script, at, "/")
            if at < 0:
                return -1
            at = match_end(re.compile("[IM]*"), script, at)
        comma = re.compile(r"\s*,\s*[+~]?").match(script, at)
        if comma is None:
            break
        at = comma.end()
    return match_end(re.compile(r"\s*!?\s*"), script, at)


def skip_text(script: str, at: int, delimiter: str) -> int:
    """Return the position after the next delimiter; -1 if seds may differ about it."""
    if not delimiter or delimiter in "\\\n [":
        return -1
    end = at
    while end < len(script) and script[end] != delimiter:
        if script[end] == "\n" or (script[end] == "\\" and script[end + 1 : end + 2] in ("", "\n")):
            return -1
        end += 2 if script[end] == "\\" else 1
    text = script[at:end]
    if end >= len(script) or re.search(
        r"\[[^]]*$", re.sub(r"\\.", "", text)
    ):  # some take it for a part of the brackets
        return -1
    return end + 1


def match_end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return the end of a match that may be empty."""
    found = pattern.match(text, at)
    return found.end() if found else at
