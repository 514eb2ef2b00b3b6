import re
from pathlib import Path

CULPRIT = "191f56dfef3bfc812a86b2f11ee3569fad0dd9d3"


def answer_has_the_hash(workspace: Path, answer: str) -> None:
    """The answer has the hash, shortened or not, and no other number that may be one."""
    hashes = re.findall(r"\b(?=[0-9a-f]*\d)[0-9a-f]{7,40}\b", answer.lower())
    assert hashes, f"no hash is in the answer {answer!r}"
    assert all(CULPRIT.startswith(one) for one in hashes), f"the answer has {hashes}"
