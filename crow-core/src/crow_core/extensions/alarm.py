"""Was the prompt cut? A local server may drop the front of a prompt that is too long, and answer as if nothing were."""

import msgspec

from crow_core.app import Crow
from crow_core.messages import parts
from crow_core.model import Call, Request
from crow_core.session import Session

ENOUGH = 8_000
"""Characters below which a comparison says nothing."""


def alarm(crow: Crow) -> None:
    """Warn when the server counts clearly fewer prompt tokens than were sent.

    How many characters make a token is learned from the session's first counted requests, so language and tokenizer
    do not matter; an answer that counts less than 60 % of what its request must have is one that was cut.
    """

    @crow.after_model
    async def compare(session: Session, call: Call) -> None:
        counted = int(call.usage.get("prompt_tokens") or 0)
        sent = characters(call.request)
        if not counted:
            return
        ratio = session.state.get("characters_a_token")
        expected = sent / (ratio or 8.0)  # no tokenizer packs more than eight characters of such text into a token
        if sent > ENOUGH and counted < 0.6 * expected:
            window = session.model.window
            size = f" Its window seems to be about {counted:,} tokens." if not window or counted < window else ""
            await session.notice(
                f"The server read only {counted:,} of about {expected:,.0f} prompt tokens: it cut the beginning, with "
                f"the instructions.{size} Give it a larger context (Ollama: num_ctx, llama.cpp: -c), or start anew.",
                "error",
            )
        elif ratio is None or sent > ENOUGH:
            session.state["characters_a_token"] = sent / counted


def characters(request: Request) -> int:
    """How much text a request holds; images count as nothing, as their tokens depend on the model."""
    texts = (part.get("text", "") for message in request["messages"] for part in parts(message.get("content")))
    calls = [message["tool_calls"] for message in request["messages"] if message.get("tool_calls")]
    return sum(map(len, texts)) + len(msgspec.json.encode([request.get("tools"), calls]))
