"""The errors of the app as a client gets them."""

from collections.abc import Awaitable
from typing import Any

from msgspec import UNSET

from crow_core.acp.connection import RpcError
from crow_core.acp.schema import AUTH_REQUIRED, INTERNAL_ERROR, INVALID_REQUEST, NOT_FOUND
from crow_core.errors import ConfigError, ModelError, PromptError, SessionBusy, StoreError


async def find_stored(id: str, finding: Awaitable[object]) -> None:
    """Await what finds or changes a stored session. Raises RpcError if that fails, or if there is no such session."""
    try:
        found = await finding
    except StoreError as error:
        raise to_store_rpc_error(error, id) from error
    if not found:
        raise make_unknown_session_error(id)


def make_unknown_session_error(id: str) -> RpcError:
    """Make the error for an id that no session has."""
    return RpcError(NOT_FOUND, "Unknown session", {"sessionId": id, "details": f"No session {id!r}."})


def to_store_rpc_error(error: StoreError, id: str = "") -> RpcError:
    """Convert an error of the store, or of a session that is open elsewhere."""
    data: dict[str, Any] = {"details": str(error), "retry": True}
    if id:
        data["sessionId"] = id
    if isinstance(error, SessionBusy):
        return RpcError(INVALID_REQUEST, "The session is open elsewhere", {**data, "canFork": True})
    return RpcError(INTERNAL_ERROR, "The stored sessions cannot be used", data)


def to_model_rpc_error(error: ModelError) -> RpcError:
    """Convert the error for a missing model."""
    return RpcError(AUTH_REQUIRED, "No model is configured", details=str(error))


def to_config_rpc_error(error: ConfigError) -> RpcError:
    """Convert the error for a setting that cannot be used."""
    return RpcError(INTERNAL_ERROR, "The configuration cannot be used", details=str(error))


def to_turn_rpc_error(error: ModelError | StoreError | PromptError | ConfigError) -> RpcError:
    """Convert the error that has ended a turn."""
    match error:
        case ModelError():
            may_pass = {"retry": True} if error.may_pass else UNSET
            return RpcError(INTERNAL_ERROR, "The model did not answer", may_pass, details=str(error))
        case StoreError():
            kind = {"lost": True} if error.is_lost else {"retry": True}
            return RpcError(INTERNAL_ERROR, "The session cannot be stored", kind, details=str(error))
        case PromptError():
            return RpcError(INTERNAL_ERROR, "The prompt cannot be used", details=str(error))
        case ConfigError():  # an extension's function gave a hook what it does not take
            return to_config_rpc_error(error)
