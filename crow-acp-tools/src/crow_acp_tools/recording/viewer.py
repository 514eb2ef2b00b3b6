"""Print a recording in the terminal."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import click
import msgspec
from crow_core.text import escape_controls

from crow_acp_tools.check.validation import get_path, str_or_empty, to_short_json
from crow_acp_tools.recording.file import OTHER_SIDE, Message, RecordedLine, Side

WIDTH = 160
"""Characters of a message's content that are printed unless messages are printed whole."""


@dataclass(eq=False)
class RecordedRequest:
    """A request in a recording, with the number of its answers."""

    at: float
    title: str
    """The method and the id."""
    method: str
    session: str
    answers: int = 0


@dataclass
class RecordingViewer:
    """Renders the lines of a recording, one after the other, for a terminal that they cannot control."""

    method: str = "*"
    """A shell pattern of the methods to show; an answer is shown with its request."""
    session: str = ""
    """The beginning of the id of the session to show; the empty text shows all sessions."""
    full: bool = False
    """Show messages whole."""
    requests: dict[tuple[Side, str], RecordedRequest] = field(default_factory=dict[tuple[Side, str], RecordedRequest])

    def render(self, line: RecordedLine) -> str:
        """Return the text to print for a line; the empty text for a line that is not to be shown."""
        if line.message is None:
            shows_all = self.method == "*" and not self.session
            content = line.raw.decode(errors="backslashreplace")[:WIDTH]
            return self.format_line(line, click.style("no message", fg="red"), content) if shows_all else ""
        if "method" in line.message:
            request, title = self.add_request(line, line.message), ""
            content = summarize_params(line.message.get("params"))
        else:
            request, title = self.match_answer(line, line.message)
            kind = "error" if "error" in line.message else "result"
            content = ("error " if kind == "error" else "") + to_short_json(line.message.get(kind), WIDTH)
        if not self.is_shown(request):
            return ""
        return self.format_line(line, escape_controls(request.title) + title, content)

    def is_shown(self, request: RecordedRequest) -> bool:
        return fnmatchcase(request.method, self.method) and request.session.startswith(self.session)

    def add_request(self, line: RecordedLine, message: Message) -> RecordedRequest:
        method, session = str_or_empty(message["method"]), str_or_empty(get_path(message, "params", "sessionId"))
        if "id" not in message:
            return RecordedRequest(line.at, method, method, session)
        request = RecordedRequest(line.at, f"{method} #{to_short_json(message['id'])}", method, session)
        self.requests[line.side, to_short_json(message["id"])] = request
        return request

    def match_answer(self, line: RecordedLine, message: Message) -> tuple[RecordedRequest, str]:
        """Return the request of an answer, and a remark on the answer."""
        id = to_short_json(message.get("id"))
        if (request := self.requests.get((OTHER_SIDE[line.side], id))) is None:
            remark = click.style(f"an answer to no request, #{escape_controls(id)}", fg="red")
            return RecordedRequest(line.at, "", "", ""), remark
        request.answers += 1
        request.session = request.session or str_or_empty(get_path(message, "result", "sessionId"))
        again = click.style(" again", fg="red") if request.answers > 1 else ""
        return request, f"{again} after {format_duration(line.at - request.at)}"

    def format_line(self, line: RecordedLine, title: str, content: str) -> str:
        arrow = click.style("→", fg="cyan") if line.side == "client" else click.style("←", fg="green")
        first = f"{line.at:10.3f} {arrow} {title}"
        if not self.full:
            return f"{first}  {click.style(escape_controls(content), dim=True)}"
        try:
            whole = msgspec.json.format(line.raw, indent=2)
        except (msgspec.DecodeError, RecursionError):
            whole = line.raw
        parts = whole.decode(errors="backslashreplace").split("\n")
        return "\n".join([first, *(f"{'':13}{escape_controls(part)}" for part in parts)])

    def list_unanswered(self) -> list[str]:
        """List the requests that have no answer yet."""
        return [
            f"{request.at:10.3f} {escape_controls(request.title)} was not answered"
            for request in self.requests.values()
            if not request.answers and self.is_shown(request)
        ]


def format_duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"


def summarize_params(params: Any) -> str:
    """Return the parameters of a request as short JSON; of an update its kind and its text."""
    update = get_path(params, "update")
    kind, text = str_or_empty(get_path(update, "sessionUpdate")), get_path(update, "content", "text")
    if not kind:
        return to_short_json(params, WIDTH)
    return f"{kind} {to_short_json(text if isinstance(text, str) else update, WIDTH)}"


def print_recording(recording: Iterable[RecordedLine], viewer: RecordingViewer, speed: float, *, step: bool) -> None:
    """Print a recording, then the requests without an answer. `speed` divides the recorded pauses; 0 omits them."""
    before = 0.0
    for line in recording:
        if speed:
            time.sleep(max(0.0, line.at - before) / speed)
        before = line.at
        if not (text := viewer.render(line)):
            continue
        click.echo(text)
        if step and click.getchar() == "q":
            return
    for text in viewer.list_unanswered():
        click.secho(text, fg="red")
