"""Ask a stored request again, with another prompt version or model; the answers are shown side by side."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crow_agent.settings.config import load_config, load_environment
from crow_agent.settings.discovery import search_models
from crow_agent.settings.home import Home
from crow_core.app import Crow
from crow_core.errors import StoreError
from crow_core.messages.message import Message
from crow_core.session.prompts import Prompt
from crow_eval.commands.reask_command import choose_model, find_only_model
from crow_eval.reask import KIND, Changes, Reasked, StoredSession, load_stored, reask_all
from crow_persistence import loader, prompt_versions, requests
from crow_persistence.extension import persistence
from crow_persistence.loader import SELECT_FIRST_KIND
from crow_persistence.tables import sessions
from sqlalchemy import Connection, Row, select
from starlette.requests import Request

from crow_web import queries
from crow_web.pages import Pages


@dataclass(frozen=True)
class AskedAgain:
    """An answer to a request that was asked again."""

    session: str
    """The id of the session that holds it."""
    changes: str
    """The changes to the request, in words."""
    reply: Message
    call: Row[Any] | None
    """Its model call."""


def load_until(connection: Connection, call: Row[Any]) -> StoredSession:
    """Load the session of a model call up to its reply, to ask for it again. Raises StoreError."""
    stored = load_stored(connection, call.of)
    numbers = [number for number, one in enumerate(stored.requests, 1) if one.model_call == call.id]
    if not numbers:
        raise StoreError("Only a request of a turn that was answered can be asked again.")
    stored.requests = stored.requests[: numbers[0]]
    return stored


def list_asked_again(connection: Connection, call: Row[Any]) -> list[AskedAgain]:
    """Return the answers to a request that was asked again, oldest first."""
    origin = loader.find_session_by_id(connection, call.of)
    if origin is None or call.reply is None:
        return []
    its = select(sessions).where(sessions.c.cwd == origin.cwd, sessions.c.created >= origin.created)
    its = its.where(sessions.c.deleted.is_(None), SELECT_FIRST_KIND.scalar_subquery() == KIND)
    found: list[AskedAgain] = []
    number = 0
    for row in connection.execute(its.order_by(sessions.c.number)).all():
        log = loader.load_with_progress(connection, row)[0].log
        notes: Mapping[str, Any] = log[0].get("crow", {}) if log else {}
        if notes.get("origin") != call.of:
            continue
        number = number or len(load_until(connection, call).requests)
        for entry in log:
            if entry.get("role") == "assistant" and entry.get("crow", {}).get("request") == number:
                made = {it.id: it for it in queries.list_session_calls(connection, row.number)}
                id = entry.get("crow", {}).get("id", "")
                found.append(AskedAgain(row.id, describe_changes(notes), entry, made.get(id)))
    return found


def describe_changes(notes: Mapping[str, Any]) -> str:
    """Return the changes to a request in words."""
    prompt, _, version = str(notes.get("prompt") or "").partition(" ")
    named = [f"the prompt {prompt} {version[:8]}"] if prompt else []
    named += [f"the model {notes['model']}"] if notes.get("model") else []
    return "with " + " and ".join(named) if named else "unchanged"


def show_form(pages: Pages, connection: Connection, request: Request) -> str:
    """Show what asking a request again takes, and ask whether to do it."""
    call = requests.find_model_call(connection, request.path_params["id"])
    load_until(connection, call)
    home = Home.find(pages.env)
    configured = load_config(home, pages.env).models
    return pages.render(
        "ask.html",
        call=call,
        versions=prompt_versions.list_versions(connection, "system")[::-1],
        models=list(dict.fromkeys([*configured, *queries.list_models(connection)])),
    )


def ask(pages: Pages, form: Mapping[str, str], request: Request) -> str:
    """Ask a request again, and return the address of the page that shows both answers.

    A request that was asked again with the same changes is not sent once more. Raises ConfigError, ModelError,
    PromptError, StoreError.
    """
    with pages.database.begin_read() as connection:
        call = requests.find_model_call(connection, request.path_params["id"])
        stored = load_until(connection, call)
        reference = form.get("prompt", "")
        version = prompt_versions.find_version(connection, reference) if reference else None
    template = Prompt(version.name, version.template) if version else None
    outcome = asyncio.run(send(pages, stored, template, form.get("model", "").strip()))
    if outcome.error:
        raise StoreError(outcome.error)
    return f"/call/{call.id}#again"


async def send(pages: Pages, stored: StoredSession, prompt: Prompt | None, model: str) -> Reasked:
    """Send the last request of a session again. Raises ConfigError, ModelError, PromptError, StoreError."""
    home = Home.find(pages.env)
    config, env = load_config(home, pages.env), load_environment(home, pages.env)
    models = (await search_models(config, env, model or find_only_model([stored], env))).models
    changes = Changes(prompt, next(iter(models.values())) if model else None, {}, len(stored.requests))
    url = pages.database.url.render_as_string(hide_password=False)
    app = Crow(models).use(persistence, url=url, folder=pages.database.folder)
    try:
        (outcome,) = await reask_all(
            app, pages.database, [stored], changes, lambda one: choose_model(models, changes, one), 1, lambda _: None
        )
    finally:
        await app.shut_down()
    return outcome
