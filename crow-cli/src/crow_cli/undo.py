"""`crow undo`: takes back the last turns of a stored session, as /undo does in an open one."""

import os
import sys
from typing import TYPE_CHECKING, NoReturn

import click
from crow_core.acp.connection import ConnectionClosed
from crow_core.acp.schema import ClientCapabilities
from crow_core.errors import StoreError
from msgspec import Struct

from crow_cli.ending import complete, wrong
from crow_cli.history import reading, say
from crow_cli.screen import spelled_out

if TYPE_CHECKING:
    from crow_core.store import Summary


@click.command()
@click.argument("session", metavar="[ID]", default="")
@click.option("--turns", type=click.IntRange(min=1), default=1, show_default=True, help="How many turns to take back.")
@click.option("--yes", is_flag=True, help="Do it without asking.")
def undo(session: str, turns: int, yes: bool) -> None:
    """Take back the last turn: its edits, and what was said. Without an ID, of the last session in this folder."""
    from crow_persistence.loader import find_session, list_sessions, to_summary

    with reading() as connection:
        if session:
            found = to_summary(find_session(connection, session))
        elif sessions := list_sessions(connection, os.getcwd(), "", 1).sessions:
            found = sessions[0]
        else:
            wrong(f"There is no session of {os.getcwd()}. Name one; crow sessions list --all shows them.")
    try:
        sys.exit(complete(take_back(found, turns, yes)))
    except KeyboardInterrupt:
        sys.exit(130)
    except StoreError as error:
        wrong(spelled_out(str(error)))


class Nobody:
    """The client of a session that nobody looks at."""

    capabilities = ClientCapabilities()

    async def request(self, method: str, params: Struct) -> NoReturn:
        raise ConnectionClosed

    async def notify(self, method: str, params: Struct) -> None:
        pass


async def take_back(found: "Summary", turns: int, yes: bool) -> int:
    """Open the session, so that nobody else writes to it meanwhile, tell, ask, and do it; gives the exit code."""
    from crow_core.app import Crow
    from crow_core.extensions.undo import UndoError, plan_undo, take_back
    from crow_core.models.chat import ChatModel
    from crow_core.settings.config import Home, get_database_url, load_config
    from crow_persistence.extension import persistence

    home = Home.find(os.environ)
    crow = Crow(ChatModel(name="none"))
    crow.use(persistence, url=get_database_url(load_config(home, os.environ), home), folder=home.data)
    try:
        session = await crow.load(Nobody(), found.id, found.cwd, roots=found.roots[1:])
        if session is None:
            raise StoreError(f"There is no session {found.id!r} any more.")
        if session.log.damage:
            say(spelled_out(session.log.damage))
        click.echo(spelled_out(str(plan_undo(session.log, turns))))
        if not yes and not click.confirm("\nTake this back?"):
            return 1
        click.echo(spelled_out(await take_back(session, turns)))
    except UndoError as error:
        click.secho(f"crow: {spelled_out(str(error))}", fg="red", err=True)
        return 1
    finally:
        await crow.shut_down()
    return 0
