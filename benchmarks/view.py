"""Measure the time to derive the request from a log of 2,000 messages: at once, and from one request to the next.

uv run benchmarks/view.py
"""

from statistics import median
from time import perf_counter

from crow_core.messages.message import Message, answer_tool_call
from crow_core.messages.passes import view
from crow_core.messages.view import View


def long_log(messages: int) -> list[Message]:
    """Return the log of a session with tools: a prompt, a reply with a tool call, its result, and a closing reply per
    turn."""
    log: list[Message] = []
    for turn in range(messages // 4):
        arguments = '{"command": "view", "path": "src/module.py", "view_range": [1, 200]}'
        tool_call = {
            "id": f"call_{turn}",
            "type": "function",
            "function": {"name": "file_editor", "arguments": arguments},
        }
        log += [
            {"role": "user", "content": "Look at the module and say what it does."},
            {"role": "assistant", "content": "I look.", "reasoning_content": "Hm. " * 50, "tool_calls": [tool_call]},  # pyright: ignore[reportAssignmentType]
            answer_tool_call(tool_call, "def f(): ...\n" * 100),  # pyright: ignore[reportArgumentType]
            {"role": "assistant", "content": "It defines a function. " * 10, "crow": {"id": str(turn)}},
        ]
    return log


def main() -> None:
    log = long_log(2000)
    whole: list[float] = []
    grown: list[float] = []
    for _ in range(30):
        begun = perf_counter()
        view(log)
        whole.append(perf_counter() - begun)
    growing = View(log)
    growing.messages()
    for turn in range(30):
        log += [{"role": "user", "content": f"Question {turn}"}, {"role": "assistant", "content": "Answer."}]
        begun = perf_counter()
        growing.messages()
        grown.append(perf_counter() - begun)
    print(f"{'view of 2,000 messages, at once':40} {median(whole) * 1e3:8.2f} ms")
    print(f"{'the same log, two messages later':40} {median(grown) * 1e3:8.2f} ms")


if __name__ == "__main__":
    main()
