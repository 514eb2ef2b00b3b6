import ast
import re
from pathlib import Path

FILES = Path(__file__).parent / "files"


def answer_names_this_function_only(workspace: Path, answer: str) -> None:
    """Of all functions of the start, the answer has one."""
    trees = [ast.parse(path.read_text("utf-8")) for path in FILES.rglob("*.py")]
    functions = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert functions & set(re.findall(r"\w+", answer)) == {"lane_for"}, f"the answer is {answer!r}"
