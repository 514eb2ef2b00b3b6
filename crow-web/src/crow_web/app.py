"""The addresses of `crow web`."""

from collections.abc import Mapping
from functools import partial

from crow_persistence.database import Database
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from crow_web import (
    ask_again,
    call_pages,
    chart_pages,
    evaluation_pages,
    markup,
    permission_pages,
    prompt_pages,
    session_pages,
    timeline,
    workflow_pages,
)
from crow_web.chats import Chats
from crow_web.pages import HERE, Change, Handler, Pages

PAGES: Mapping[str, Handler] = {
    "/": session_pages.show_sessions,
    "/session/{id}": timeline.show_session,
    "/session/{id}/entry/{entry}": timeline.show_entry,
    "/session/{id}/dropped": timeline.show_dropped,
    "/session/{id}/files": timeline.show_files,
    "/session/{id}/calls": call_pages.show_calls,
    "/call/{id}": call_pages.show_call,
    "/call/{id}/ask": ask_again.show_form,
    "/permissions": permission_pages.show_permissions,
    "/prompts": prompt_pages.show_prompts,
    "/prompts/{name:path}": prompt_pages.show_prompt,
    "/evaluations": evaluation_pages.show_evaluations,
    "/evaluations/{id}": evaluation_pages.show_evaluation,
    "/workflows": workflow_pages.show_workflows,
    "/workflows/{id:path}": workflow_pages.show_workflow,
    "/charts": chart_pages.show_charts,
}
CHANGES: Mapping[str, Change] = {
    "/call/{id}/ask": ask_again.ask,
    "/permissions/revoke": permission_pages.revoke,
    "/workflows/{id:path}": workflow_pages.answer,
}
"""The addresses of forms that change something."""


def make_app(
    database: Database,
    env: Mapping[str, str] | None = None,
    *,
    chats: Chats | None = None,
    read_only: bool = False,
) -> Starlette:
    """Make the app that answers requests which the gate has let in.

    `env` holds the environment variables that name the settings. With `read_only`, no form is answered.
    """
    pages = Pages(database, env or {}, read_only=read_only, has_chats=chats is not None)
    routes = [Route(path, partial(pages.answer, handler)) for path, handler in PAGES.items()]
    if not read_only:
        routes += [Route(path, partial(pages.answer_form, it), methods=["POST"]) for path, it in CHANGES.items()]
    return Starlette(
        routes=[
            *routes,
            Route("/session/{id}/export", partial(session_pages.export, pages)),
            Route("/static/code.css", answer_with_style),
            Mount("/static", StaticFiles(directory=HERE / "static")),
            *(chats.routes if chats else ()),
        ],
        lifespan=chats.lifespan if chats else None,
    )


def answer_with_style(request: Request) -> Response:
    return Response(markup.make_code_style(), media_type="text/css")
