import re
from pathlib import Path

LEAKING = {"r-1017", "r-1027", "r-1045"}


def answer_names_these_requests_only(workspace: Path, answer: str) -> None:
    named = set(re.findall(r"r-\d+", answer))
    assert named == LEAKING, f"the answer names {sorted(named)}"
