"""Durable workflows: their runs and steps, and the approvals that they wait for."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from crow_agent.workflows import WorkflowError, WorkflowHandle, list_steps, list_workflows
from crow_agent.workflows import answer as give_answer
from crow_agent.workflows.answers import list_asked
from crow_agent.workflows.location import find_url
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from starlette.requests import Request

from crow_web.pages import Pages

T = TypeVar("T")
LISTED = 100
"""Workflows of the list, the latest."""
EMPTY = "No workflow has been started yet. Runs of functions with @workflow stand here, and what they ask you."


def show_workflows(pages: Pages, connection: Connection, request: Request) -> str:
    """Show the runs of workflows, those that wait for an approval first."""

    async def read() -> tuple[list[Any], list[Any]]:
        return await list_workflows(limit=LISTED, env=pages.env), await list_asked(env=pages.env)

    sentence, runs, waiting = "", list[Any](), list[Any]()
    try:
        runs, asked = read_stored(pages, read)
        waiting = [each for each in asked if each.answer is None]
    except WorkflowError as error:
        sentence = str(error)
    return pages.render("workflows.html", runs=runs, waiting=waiting, sentence=sentence or EMPTY)


def show_workflow(pages: Pages, connection: Connection, request: Request) -> str:
    """Show the steps of a workflow, and what it waits for. Raises WorkflowError."""
    id, url = request.path_params["id"], find_url(pages.env)[0]

    async def read() -> tuple[Any, list[Any], list[Any]]:
        status = await WorkflowHandle[Any](id, url).status()
        return status, await list_steps(id, env=pages.env), await list_asked(id, env=pages.env)

    run, steps, asked = read_stored(pages, read)
    return pages.render("workflow.html", run=run, steps=steps, asked=asked)


def answer(pages: Pages, form: Mapping[str, str], request: Request) -> str:
    """Approve or reject what a workflow waits for. Raises WorkflowError, also if it has an answer already."""
    id = request.path_params["id"]
    note, label, approved = form.get("note", ""), form.get("step", ""), form.get("answer") == "approve"
    read_stored(pages, lambda: give_answer(id, approved, note, label=label, env=pages.env, by="the user, on the page"))
    return f"/workflows/{id}"


def read_stored(pages: Pages, function: Callable[[], Awaitable[T]]) -> T:
    """Run a function of the workflows' library in this thread. Raises WorkflowError, also if there are no workflows."""

    async def run() -> T:
        return await function()

    url = find_url(pages.env)[0]
    if url.startswith("sqlite:///") and not os.path.exists(url.removeprefix("sqlite:///")):
        raise WorkflowError(EMPTY)
    try:
        return asyncio.run(run())
    except DBAPIError as error:
        if "workflow_status" in str(error.orig):
            raise WorkflowError(EMPTY) from error
        raise WorkflowError(f"The database of the workflows does not answer: {error.orig}") from error
    except ModuleNotFoundError as error:
        raise WorkflowError(
            f"Durable workflows need a library ({error}). Install crow-agent[workflows] where crow is installed."
        ) from error
