"""The actions of a page: each is a JSON object, whose `do` names what the person did."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crow_core.acp.schema import ImageBlock

from crow_web.chat import WebChat
from crow_web.chat_session import Words, get_time
from crow_web.live import Tab, is_of_log
from crow_web.log import make_image_url


@dataclass
class ActingPage:
    """A page in a browser, over all its connections."""

    chat: WebChat | None = None
    """The chat that it shows."""
    number: int = 0
    """The number of its last action."""
    name: str = ""
    """The name that it gives itself; empty if it gives none."""


def read_json(text: str) -> Any:
    """Return the value of a JSON text from a page. Halves of surrogate pairs, which no answer can hold, become `?`."""
    value = json.loads(text)
    if "\\ud" not in text.lower():
        return value
    return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


def act(chat: WebChat, page: ActingPage, tab: Tab, action: Mapping[str, Any]) -> None:
    """Carry out an action, once: a page sends it again until it is told that it has arrived."""
    number = action.get("number")
    if isinstance(number, int):
        if number > page.number:
            page.number, chat.touched = number, get_time()
            carry_out(chat, tab, action, f"{page.name}-{number}" if page.name else "")
        tab.add({"@arrived": str(page.number)})


def carry_out(chat: WebChat, tab: Tab, action: Mapping[str, Any], name: str) -> None:
    """Carry out an action; `name` is that of a prompt."""
    match action:
        case {"do": "open"}:
            chat.start(chat.open())
        case {"do": "prompt", "text": str(text)}:
            images = [*filter(None, map(read_image, action.get("images") or []))]
            chat.say(Words(text, images, name), later=action.get("later") is not None)
        case {"do": "cancel"}:
            chat.start(chat.cancel())
        case {"do": "background"}:
            chat.start(chat.send_to_background())
        case {"do": "answer", "question": str(id), "choice": str(choice)} if id.isdecimal() and choice.isdecimal():
            chat.cards.answer(int(id), int(choice), str(action.get("text", "")))
        case {"do": "form", "question": str(id), "send": str(send)} if id.isdecimal():
            chat.cards.fill(tab, int(id), send, action)
        case {"do": "option", "option": str(option), "value": str(value)}:
            chat.start(chat.set_option(option, value))
        case {"do": "recall", "place": str(place)} if place.isdecimal():
            chat.recall(tab, int(place))
        case {"do": "folder", "folder": str(folder)}:
            chat.start(chat.move(folder))
        case {"do": "app", "call": str(call), "block": str(block)} if is_of_log(block):
            chat.start(chat.show_app(call, block))
        case {"do": "leave_out", "call": str(call)}:
            chat.leave_out(call)
        case {"do": "undo"}:
            chat.start(chat.ask_undo())
        case {"do": "undone", "send": str(send)}:
            chat.start(chat.undo(confirmed=send == "accept"))
        case {"do": "fork"}:
            chat.start(chat.fork(tab))
        case {"do": "complete", "text": str(text)}:
            chat.complete(tab, text)
        case _:
            pass


def read_image(url: Any) -> ImageBlock | None:
    """Return the image in a URL that contains it; None if it is not of a safe type."""
    head, _, data = str(url).partition(";base64,")
    image = ImageBlock(data=data, mime_type=head.removeprefix("data:"))
    return image if make_image_url(image) else None
