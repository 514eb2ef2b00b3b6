"""`crow undo`: undo the last turns of a stored session, as /undo does in an open one."""

import os
import sys
from typing import TYPE_CHECKING, NoReturn

import click
from crow_core.acp.connection import ConnectionClosed
from crow_core.acp.schema import ClientCapabilities
from crow_core.errors import StoreError
from crow_core.text import escape_controls
from msgspec import Struct

from crow_cli.console import print_note
from crow_cli.menu import confirm
from crow_cli.process import fail, run_to_end
from crow_cli.storage import connect

if TYPE_CHECKING:
    from crow_core.session.store import Summary


@click.command()
@click.argument("session", metavar="[ID]", default="")
@click.option("--turns", type=click.IntRange(min=1), default=1, show_default=True, help="How many turns to undo.")
@click.option("--keep", is_flag=True, help="Keep the files as they are that cannot be restored.")
@click.option("--yes", is_flag=True, help="Undo without asking.")
def undo(session: str, turns: int, keep: bool, yes: bool) -> None:
    """Undo the last turn of a session: its edits and its messages.

    Without an ID, undo in the last session of this folder.
    """
    from crow_persistence.loader import find_session, list_sessions, to_summary

    with connect() as connection:
        if session:
            found = to_summary(find_session(connection, session))
        elif sessions := list_sessions(connection, os.getcwd(), "", 1).sessions:
            found = sessions[0]
        else:
            fail(f"There is no session of {os.getcwd()}. Name one; crow sessions list --all shows them.")
    try:
        sys.exit(run_to_end(undo_turns(found, turns, keep, yes)))
    except KeyboardInterrupt:
        sys.exit(130)
    except StoreError as error:
        fail(escape_controls(str(error)))


class AbsentClient:
    """Stands in for a client: ignores notifications, and fails requests."""

    capabilities = ClientCapabilities()

    async def request(self, method: str, params: Struct) -> NoReturn:
        raise ConnectionClosed

    async def notify(self, method: str, params: Struct) -> None:
        pass


async def undo_turns(stored: "Summary", turns: int, keep: bool, yes: bool) -> int:
    """Print the plan, ask, undo the turns, and return the exit code. The session is open meanwhile, so that no other
    process writes to it."""
    from crow_agent.settings.config import get_database_url, load_config
    from crow_agent.settings.home import Home
    from crow_core.app import Crow
    from crow_core.models.chat_model import ChatModel
    from crow_extensions.undo import FilesDiffer, UndoError, plan_undo, take_back
    from crow_persistence.extension import persistence

    home = Home.find(os.environ)
    crow = Crow(ChatModel(name="none"))
    crow.use(persistence, url=get_database_url(load_config(home, os.environ), home), folder=home.data)
    try:
        session = await crow.load(AbsentClient(), stored.id, stored.cwd, roots=stored.roots[1:])
        if session is None:
            raise StoreError(f"There is no session {stored.id!r} any more.")
        if session.log.damage:
            print_note(escape_controls(session.log.damage))
        click.echo(escape_controls(str(plan_undo(session.log, turns, keep=keep))))
        if not yes and not confirm("\nUndo this?"):
            return 1
        click.echo(escape_controls(await take_back(session, turns, keep=keep)))
    except UndoError as error:
        hint = " --keep keeps such files as they are, and undoes the rest." if isinstance(error, FilesDiffer) else ""
        click.secho(f"crow: {escape_controls(str(error))}{hint}", fg="red", err=True)
        return 1
    finally:
        await crow.shut_down()
    return 0
