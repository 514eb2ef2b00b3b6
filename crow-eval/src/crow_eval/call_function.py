"""Call the function of a check, in a process of its own: `python call_function.py FILE NAME WORKSPACE < ANSWER`.

The exit code is 0 if the check passes, and 1 if not, with the reason on standard error. It imports nothing of crow.
"""

import asyncio
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any


def call(file: str, name: str, workspace: str, answer: str) -> str:
    """Call the function; return why the check has failed, or "" if it passed."""
    sys.path.insert(0, str(Path(file).parent))
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if spec is None or spec.loader is None:
        return f"{file} is no Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[Path(file).stem] = module
    try:
        spec.loader.exec_module(module)
        result: Any = getattr(module, name)(Path(workspace), answer)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
    except AssertionError as error:
        return str(error) or f"an assertion of {name} does not hold"
    except Exception as error:  # a check may raise anything, which fails it
        return f"{type(error).__name__}: {error}"
    if result is None or result is True:
        return ""
    return result if isinstance(result, str) and result else f"{name} returned {result!r}"


if __name__ == "__main__":
    reason = call(sys.argv[1], sys.argv[2], sys.argv[3], sys.stdin.read())
    sys.stderr.write(reason)
    sys.exit(1 if reason else 0)
