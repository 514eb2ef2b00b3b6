"""What a model refused is not said to it again: as clients drop such a prompt (ACP, stop reasons), so does the view."""

from crow_core.acp.schema import StopReason
from crow_core.app import Crow
from crow_core.messages import find_prompts
from crow_core.session import Session


def refusal(crow: Crow) -> None:
    """Go back to before the prompt that was refused."""

    @crow.turn_end
    def forget(session: Session, outcome: StopReason | Exception) -> None:
        if outcome == "refusal" and (prompts := find_prompts(session.log)):
            before = session.log[: prompts[-1]]
            session.rewind(before[-1].get("crow", {})["id"] if before else "")
