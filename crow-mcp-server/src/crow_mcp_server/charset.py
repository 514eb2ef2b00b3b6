"""Guess the encoding of a text that says nothing about it and is not UTF-8."""

import re

WESTERN = "cp1252"
LATIN_ENCODINGS = (WESTERN, "cp1250", "iso8859-2", "cp1254", "cp1257")
OTHER_ENCODINGS = (
    *("cp1251", "koi8-r", "koi8-u", "iso8859-5", "cp866", "cp1253", "iso8859-7", "cp1255", "cp1256", "cp874"),
    *("cp932", "euc-jp", "gb18030", "big5hkscs", "cp949"),
)
SMALLER_ENCODINGS = {"euc_jis_2004": "euc_jp", "big5hkscs": "big5", "iso8859-7": "cp1253", "koi8-r": "koi8_r"}
"""Usual encodings that are tried in place of chardet's answer."""
NON_ASCII_RUN = re.compile(rb"[\x80-\xff]{6,}")
MIN_CHARACTERS = 3  # beyond ASCII, in a text that is taken for one with Latin letters that is not Western
MIN_CONFIDENCE = 0.025  # for such a text; a few words in the right encoding have 0.03 and more
MIN_RATIO = 1.5  # of the confidence in such an encoding and in the Western one
MAX_GUESSED_BYTES = 100_000


def guess_encoding(data: bytes) -> str:
    """Return a Python codec, `cp1252` unless there are clear signs of another one.

    Six bytes beyond ASCII in a row are a word in another script; they do not occur in languages with Latin letters. So
    chardet has only the encodings of Latin letters to choose from, or only the others.
    """
    import chardet  # not at the top: few texts need it

    first, second, *lines = [*data.split(b"\n"), b""]  # the first two lines may declare an encoding
    sample = b"\n".join([first, second, *(line for line in lines if not line.isascii())])[:MAX_GUESSED_BYTES]
    if any(len(set(run)) > 2 for run in NON_ASCII_RUN.findall(sample)):
        encoding = chardet.detect(sample, include_encodings=OTHER_ENCODINGS, compat_names=False)["encoding"] or WESTERN
        usual = SMALLER_ENCODINGS.get(encoding, encoding)
        return usual if _decodes_alike(data, usual, encoding) else encoding
    guesses = chardet.detect_all(sample, include_encodings=LATIN_ENCODINGS, compat_names=False)
    confidence = {guess["encoding"] or WESTERN: guess["confidence"] for guess in guesses}
    best = max(confidence, key=lambda encoding: confidence[encoding])
    is_sure = confidence[best] >= max(MIN_CONFIDENCE, MIN_RATIO * confidence.get(WESTERN, 0.0))
    return best if is_sure and sum(byte > 127 for byte in sample) >= MIN_CHARACTERS else WESTERN


def _decodes_alike(data: bytes, one: str, other: str) -> bool:
    try:
        return one == other or data.decode(one) == data.decode(other)
    except UnicodeDecodeError:
        return False
