"""Faulty MCP servers, each a command: `python -m crow_testing.servers "dies in a call"`.

`FAULTS` names them all; `make_faulty_server(fault)` returns one for `session/new`. Each has two tools: `pid` always
works and returns the process id; `bad` shows the fault, if it did not show before. They do not import
FastMCP, which takes a second.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from crow_core.acp.schema import McpServer

Message = dict[str, Any]

FAULTS: dict[str, Callable[[], None]] = {}
"""The main functions of the servers, by the names of the faults."""

DESCRIPTIONS: dict[str, str] = {}
"""Descriptions of the faults, by their names."""

MISSING_COMMAND = "no such command"
"""The fault of a server whose command does not exist."""

BLOCK = "x" * 1_000_000
FLOOD = 200_000


def make_faulty_server(fault: str, name: str = "bad") -> "McpServer":
    """Return a server with a fault, for `session/new`. Raises KeyError."""
    from crow_core.acp.schema import McpServer  # imported here, because a server process does not need it

    if fault == MISSING_COMMAND:
        return McpServer(name=name, command="no-such-command-7", args=[], env=[])
    if fault not in FAULTS:
        raise KeyError(f"There is no fault {fault!r}. There are: {', '.join([*FAULTS, MISSING_COMMAND])}.")
    return McpServer(name=name, command=sys.executable, args=["-I", __file__, fault], env=[])


# The protocol of a correct server.


def write_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def send_message(**message: Any) -> None:
    write_line(json.dumps({"jsonrpc": "2.0", **message}))


def answer_call(request: Message, text: str = "caw") -> None:
    send_message(id=request["id"], result={"content": [{"type": "text", "text": text}]})


def wait_forever() -> NoReturn:
    while True:
        time.sleep(1000)


def list_tools(request: Message) -> None:
    send_message(
        id=request["id"],
        result={"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in ("bad", "pid")]},
    )


def serve(bad: Callable[[Message], None] = answer_call, listing: Callable[[Message], None] = list_tools) -> None:
    """Answer requests until the input ends; `bad` answers calls of that tool, `listing` the requests for the tools."""
    for line in sys.stdin:
        request: Message = json.loads(line)
        match request:
            case {"method": "initialize", "id": id, "params": {"protocolVersion": version}}:
                about = {"name": "bad", "version": "1"}
                send_message(
                    id=id, result={"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
                )
            case {"method": "tools/list"}:
                listing(request)
            case {"method": "tools/call", "params": {"name": "bad"}}:
                bad(request)
            case {"method": "tools/call"}:
                answer_call(request, str(os.getpid()))
            case {"method": str(), "id": id}:
                send_message(id=id, error={"code": -32601, "message": "Method not found"})
            case _:
                pass


def register_start_fault(trouble: Callable[[], None]) -> None:
    """Register a fault that shows before the server sends anything."""

    def run() -> None:
        trouble()
        serve()

    register(trouble, run)


def register_list_fault(trouble: Callable[[Message], None]) -> None:
    """Register a fault that shows when the tools are listed."""
    register(trouble, partial(serve, listing=trouble))


def register_call_fault(trouble: Callable[[Message], None]) -> None:
    """Register a fault that shows when `bad` is called."""
    register(trouble, partial(serve, trouble))


def register(trouble: Callable[..., None], run: Callable[[], None]) -> None:
    name = trouble.__name__.replace("_", " ")
    FAULTS[name] = run
    DESCRIPTIONS[name] = str(trouble.__doc__)


# Faults that show before a tool is called.


@register_start_fault
def hangs_at_start() -> None:
    """Sends nothing."""
    wait_forever()


@register_start_fault
def exits_at_once() -> None:
    """Prints an error and exits."""
    sys.exit("ImportError: no module named 'birds'")


@register_start_fault
def prints_junk() -> None:
    """Begins with a banner, escape sequences, incomplete JSON, and JSON other than a message."""
    for line in ("Welcome to my server!", "\x1b[2J\x1b]52;c;aGk=\x07", "[1, 2]", "{}", '{"jsonrpc": "2.0"', "null", ""):
        write_line(line)
    sys.stdout.buffer.write(b"\xff\xfe\x00\n")


@register_start_fault
def prints_100_MB_of_junk() -> None:
    """Begins with a line of 100 MB that is not a message."""
    for _ in range(100):
        sys.stdout.write(BLOCK)
    write_line("")


@register_start_fault
def ignores_signals() -> None:
    """Ignores the end of its input and SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    serve()
    wait_forever()


@register_list_fault
def hangs_at_list(request: Message) -> None:
    """Answers `initialize` and never lists its tools."""
    wait_forever()


@register_list_fault
def dies_at_list(request: Message) -> None:
    """Answers `initialize` and exits when it should list its tools."""
    os._exit(1)


@register_list_fault
def lists_100_MB(request: Message) -> None:
    """Lists a tool whose description has 100 MB."""
    sys.stdout.write(
        f'{{"jsonrpc": "2.0", "id": {request["id"]}, "result": {{"tools": [{{"name": "bad", "description": "'
    )
    for _ in range(100):
        sys.stdout.write(BLOCK)
    write_line('", "inputSchema": {"type": "object"}}]}}')


@register_list_fault
def lists_a_tool_that_is_none(request: Message) -> None:
    """Lists a third tool whose schema is not an object."""
    names = {"bad": {"type": "object"}, "odd": "none", "pid": {"type": "object"}}
    send_message(
        id=request["id"], result={"tools": [{"name": name, "inputSchema": schema} for name, schema in names.items()]}
    )


# Faults that show in a tool call.


@register_call_fault
def hangs_in_a_call(request: Message) -> None:
    """Never answers."""


@register_call_fault
def stops_reading(request: Message) -> None:
    """Never answers and reads no more input."""
    wait_forever()


@register_call_fault
def dies_in_a_call(request: Message) -> None:
    """Exits without an answer."""
    os._exit(1)


@register_call_fault
def dies_in_an_answer(request: Message) -> None:
    """Exits after half an answer."""
    sys.stdout.write(f'{{"jsonrpc": "2.0", "id": {request["id"]}, "result": {{"content": [{{"type": "te')
    sys.stdout.flush()
    os._exit(1)


@register_call_fault
def dies_before_its_children(request: Message) -> None:
    """Exits without an answer, while a child process holds its standard streams open."""
    start_child()
    os._exit(1)


@register_call_fault
def leaves_children(request: Message) -> None:
    """Starts two processes that outlive it, one in its own session, and returns their ids."""
    answer_call(request, " ".join(map(str, (start_child(), start_child(start_new_session=True)))))


@register_call_fault
def leaves_children_without_a_trace(request: Message) -> None:
    """Starts two processes outside of its environment and session, one of them an orphan, and returns their ids."""
    wait = "trap '' TERM HUP; echo $$; exec >&-; while :; do /bin/sleep 1000; done"
    apart = 'env -i setsid sh -c "$1"'
    lines: list[str] = []
    for script in (f"exec {apart}", f"{apart} & exit"):
        child = subprocess.Popen(["sh", "-c", script, "sh", wait], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert child.stdout
        lines.append(child.stdout.readline().decode().strip())
    answer_call(request, " ".join(lines))


def start_child(**how: Any) -> int:
    """Start a process that ignores SIGTERM and holds the standard streams open; return its id."""
    return subprocess.Popen(["sh", "-c", "trap '' TERM; while :; do sleep 1000; done"], **how).pid


@register_call_fault
def answers_with_100_MB(request: Message) -> None:
    """Answers with a text of 100 MB, in lines of a hundred letters."""
    sys.stdout.write(f'{{"jsonrpc": "2.0", "id": {request["id"]}, "result": {{"content": [{{"type": "text", "text": "')
    for _ in range(100):
        sys.stdout.write(("x" * 99 + "\\n") * 10_000)
    write_line('the end"}]}}')


@register_call_fault
def answers_with_one_line_of_100_MB(request: Message) -> None:
    """Answers with a text of 100 MB without a line break; the id comes last, as in JavaScript's servers."""
    sys.stdout.write('{"result": {"content": [{"type": "text", "text": "')
    for _ in range(100):
        sys.stdout.write(BLOCK)
    write_line(f'the end"}}]}}, "jsonrpc": "2.0", "id": {request["id"]}}}')


@register_call_fault
def answers_with_empty_blocks(request: Message) -> None:
    """Answers with 200,000 blocks of empty text."""
    blocks = ", ".join(['{"type": "text", "text": ""}'] * FLOOD)
    write_line(f'{{"jsonrpc": "2.0", "id": {request["id"]}, "result": {{"content": [{blocks}]}}}}')


@register_call_fault
def answers_with_invalid_blocks(request: Message) -> None:
    """Answers with 200,000 blocks that are none."""
    blocks = ", ".join(["{}"] * FLOOD)
    write_line(f'{{"jsonrpc": "2.0", "id": {request["id"]}, "result": {{"content": [{blocks}]}}}}')


@register_call_fault
def answers_at_great_depth(request: Message) -> None:
    """Answers with 500 objects within each other."""
    deep = '{"a": ' * 500 + "1" + "}" * 500
    write_line(f'{{"jsonrpc": "2.0", "id": {request["id"]}, "result": {{"content": [], "structuredContent": {deep}}}}}')


@register_call_fault
def answers_nonsense(request: Message) -> None:
    """Answers with half a character and half an escape sequence, which is not JSON."""
    line = f'{{"jsonrpc": "2.0", "id": {request["id"]}, "result": {{"content": [{{"type": "text", "text": "\\ud8'
    sys.stdout.buffer.write(line.encode() + b'\xff"}]}}\n')
    sys.stdout.flush()


@register_call_fault
def answers_with_half_a_character(request: Message) -> None:
    """Answers with a text that is cut in the middle of an emoji, as JavaScript does."""
    answer_call(request, "caw \ud83d")


@register_call_fault
def answers_what_is_no_result(request: Message) -> None:
    """Answers with JSON other than a result of a tool call."""
    send_message(id=request["id"], result={"content": {"caw": [None] * 1000}})


@register_call_fault
def answers_others(request: Message) -> None:
    """Answers requests that were never made, then the real one."""
    for id in (10**9, "1", -1, None):
        send_message(id=id, result={"content": [{"type": "text", "text": "forged"}]})
    answer_call(request)


@register_call_fault
def answers_in_latin_1(request: Message) -> None:
    """Answers in an encoding that is not UTF-8."""
    text = json.dumps({"content": [{"type": "text", "text": "Krähe"}]}, ensure_ascii=False)
    sys.stdout.buffer.write(f'{{"jsonrpc": "2.0", "id": {request["id"]}, "result": {text}}}\n'.encode("latin-1"))
    sys.stdout.flush()


@register_call_fault
def floods_with_notifications(request: Message) -> None:
    """Sends 20,000 notifications of every kind before it answers."""
    for count in range(5_000):
        send_message(method="notifications/message", params={"level": "error", "data": f"{count}\x1b[2J"})
        send_message(method="notifications/tools/list_changed")
        send_message(method="notifications/progress", params={"progressToken": request["id"], "progress": count})
        send_message(method="notifications/of/its/own", params={"count": count})
    answer_call(request)


@register_call_fault
def floods_with_requests(request: Message) -> None:
    """Asks for the roots 50,000 times, and reads none of the answers before it answers."""
    for count in range(FLOOD // 4):
        sys.stdout.write(f'{{"jsonrpc": "2.0", "id": "roots-{count}", "method": "roots/list"}}\n')
    answer_call(request)


@register_call_fault
def floods_standard_error(request: Message) -> None:
    """Writes 100 MB to standard error before it answers."""
    for _ in range(100):
        sys.stderr.write(BLOCK)
    answer_call(request)


@register_call_fault
def asks_for_secrets(request: Message) -> None:
    """Sends a form of 1 MB with escape sequences and 1,000 fields, and a page whose URL is a script."""
    fields = {f"field {count}\x1b[2J": {"type": "string", "title": "Password\u202e"} for count in range(1_000)}
    schema = {"type": "object", "properties": fields, "required": list(fields)}
    send_message(
        id="a", method="elicitation/create", params={"message": "\x1b]52;c;aGk=\x07" + BLOCK, "requestedSchema": schema}
    )
    page = {"mode": "url", "message": "Sign in", "url": "javascript:alert(1)", "elicitationId": "1"}
    send_message(id="b", method="elicitation/create", params=page)
    answers = [json.loads(sys.stdin.readline()) for _ in "ab"]
    answer_call(request, json.dumps([each.get("result", each.get("error")) for each in answers]))


if __name__ == "__main__":
    match sys.argv[1:]:
        case [name] if name in FAULTS:
            FAULTS[name]()
        case _:
            sys.exit("\n".join(["Which fault?", *(f"  {name}: {text}" for name, text in DESCRIPTIONS.items())]))
