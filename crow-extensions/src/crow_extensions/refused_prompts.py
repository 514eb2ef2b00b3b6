"""Take a refused prompt out of what the model reads. Clients drop such a prompt, too (ACP, stop reasons)."""

from crow_core.acp.schema import StopReason
from crow_core.app import Crow
from crow_core.messages.message import find_prompts, get_id
from crow_core.session.session import Session


def refused_prompts(crow: Crow) -> None:
    """Rewind the session to before a prompt that the model refused."""

    @crow.turn_end
    def forget(session: Session, outcome: StopReason | Exception) -> None:
        if outcome == "refusal" and (prompts := find_prompts(session.log)):
            before = session.log[: prompts[-1]]
            session.rewind(get_id(before[-1]) if before else "")
