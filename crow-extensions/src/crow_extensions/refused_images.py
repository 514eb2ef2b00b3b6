"""Take an image that the endpoint refuses out of what the model reads; every later request would be refused, too."""

from crow_core.app import Crow
from crow_core.errors import ModelError
from crow_core.messages.message import to_digest, to_parts
from crow_core.session.session import Session


def refused_images(crow: Crow) -> None:
    """Leave out the images that an endpoint refused, tell the user, and send the request again."""

    @crow.model_error
    async def leave_out(session: Session, error: ModelError) -> bool | None:
        sent = {to_digest(part) for message in session.view.messages() for part in to_parts(message.get("content"))}
        refused = [digest for digest in error.images if digest in sent]
        if not refused:
            return None
        session.log.append({"crow": {"kind": "images", "refused": refused}})
        what = "An image was refused, and the model is not sent it any more"
        if len(refused) > 1:
            what = f"{len(refused)} images were refused, and the model is not sent them any more"
        await session.notice(f"{what}: {error.said}.", "warning")
        return True
