"""How full the context is: told to the client after each reply, and by /usage."""

from typing import Any

import msgspec

from crow_core.acp.schema import UsageUpdate
from crow_core.app import Crow
from crow_core.model import Call
from crow_core.session import Command, Session

UNKNOWN_WINDOW = 32_768
"""Tokens assumed to fit where neither the configuration nor the server tells: better too few than silently cut."""


def usage(crow: Crow) -> None:
    """Report the tokens of each model call."""

    @crow.after_model
    async def report(session: Session, call: Call) -> None:
        counted = counts(call)
        totals = session.state.setdefault("usage", {"calls": 0, "prompt": 0, "completion": 0, "cached": 0})
        totals["calls"] += 1
        for key in ("prompt", "completion", "cached"):
            totals[key] += counted[key]
        totals["used"], totals["estimated"] = counted["prompt"] + counted["completion"], not call.usage
        await session.update(UsageUpdate(used=totals["used"], size=session.model.window or UNKNOWN_WINDOW))

    @crow.commands
    def command(session: Session) -> list[Command]:
        return [Command("usage", "Tokens used so far", show)]


def counts(call: Call) -> dict[str, int]:
    """Tokens of a call, as the provider counted them, else estimated at four characters a token."""
    told: dict[str, Any] = call.usage
    if not told:
        prompt, reply = (len(msgspec.json.encode(part)) // 4 for part in (call.request, call.reply))
        return {"prompt": prompt, "completion": reply, "cached": 0}
    details: dict[str, Any] = told.get("prompt_tokens_details") or {}
    return {
        "prompt": int(told.get("prompt_tokens") or 0),
        "completion": int(told.get("completion_tokens") or 0),
        "cached": int(details.get("cached_tokens") or 0),
    }


async def show(session: Session, words: str) -> str:
    totals = session.state.get("usage")
    if not totals:
        return "The model has not been asked yet."
    size = session.model.window or UNKNOWN_WINDOW
    about = "about " if totals["estimated"] else ""
    return (
        f"Context: {about}{totals['used']:,} of {size:,} tokens{'' if session.model.window else ' (assumed)'}.\n\n"
        f"{totals['calls']} model calls: {totals['prompt']:,} tokens in ({totals['cached']:,} from the cache), "
        f"{totals['completion']:,} out."
    )
