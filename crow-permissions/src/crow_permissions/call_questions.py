"""Questions to the user about a tool call, and the answers that hold for longer than once."""

import asyncio
from collections.abc import Sequence

import msgspec
from crow_core.acp.schema import BlockContent, DiffContent, TextBlock, ToolCallContent, ToolCallFields
from crow_core.content import to_announcement, to_update
from crow_core.errors import ConfigError
from crow_core.masking import mask
from crow_core.mcp.tool import ToolCall
from crow_core.session.session import Session
from crow_core.session.user import PermissionAnswer
from crow_core.text import show_invisible, to_line

from crow_permissions.judgement import Judgement, SessionPermissions
from crow_permissions.kept_answers import KeptAnswer
from crow_permissions.lasting import Offer, get_folder, list_offers
from crow_permissions.running import find_sign_of_crow
from crow_permissions.subjects import find_subject

VARIABLES_SHOWN = 10
"""Names of variables in a question."""


def to_question(
    session: Session, tool_call: ToolCall, text: str, more: Sequence[ToolCallContent] = ()
) -> ToolCallFields:
    """Convert a tool call to a question about it, which shows a text and `more` content."""
    announcement = to_announcement(tool_call, session.cwd)
    content: list[ToolCallContent] = [*more]
    if text:
        content.insert(0, BlockContent(content=TextBlock(text=text)))
    return ToolCallFields(
        tool_call_id=tool_call.id,
        title=show_invisible(announcement.title),
        name=announcement.name,
        kind=tool_call.kind,
        status="pending",
        locations=announcement.locations,
        raw_input=announcement.raw_input,
        content=content or msgspec.UNSET,
    )


async def ask(
    session: Session, about: ToolCallFields, offers: Sequence[Offer], *, yes: str = "Allow", no: str = "Reject"
) -> tuple[PermissionAnswer, KeptAnswer | None]:
    """Ask the user; return the answer and the chosen one of the `offers`, if any. Without an answer, it is a rejection.

    Raises EndTurn if the client answers that the turn is cancelled.
    """
    answer = await session.user.ask_allowed(about, [offer.to_option() for offer in offers], yes=yes, no=no)
    return answer, next((offer.answer for offer in offers if offer.option_id == answer.choice.option_id), None)


async def ask_about_call(
    session: Session, permissions: SessionPermissions, tool_call: ToolCall, judgement: Judgement
) -> Judgement:
    """Ask the user about a tool call; without an answer it is denied.

    Raises EndTurn if the client answers that the turn is cancelled.
    """
    is_command, subject = tool_call.kind == "execute", find_subject(session, tool_call)
    diffs: Sequence[ToolCallContent] = await preview(session, tool_call) if tool_call.kind == "edit" else ()
    environment = session.folders.environment
    is_changed = is_command and environment not in permissions.environments
    variables = describe_variables(session.folders.variables) if is_changed else ""
    about = to_question(session, tool_call, "\n\n".join(filter(None, [judgement.remark, variables])), diffs)
    if is_command and subject.startswith("cd "):
        about.title = show_invisible(to_line(subject[:200]))
    offers = list_offers(judgement.rules, get_folder(session), kept=permissions.kept is not None)
    answer, chosen = await ask(session, about, offers)
    if not answer.allowed:
        if chosen:
            await keep(session, permissions, chosen)
        reason = f"{answer.reason}. {judgement.because.rstrip('.')}" if judgement.because else answer.reason
        return Judgement("deny", reason, answer=chosen, advises=bool(answer.choice.reason))
    permissions.runs_edits |= judgement.runs_edits
    permissions.environments |= {environment} if is_command else set()
    if answer.choice.command and can_change(tool_call):
        return Judgement("allow", answer.reason, command=answer.choice.command)
    if chosen:
        await keep(session, permissions, chosen)
    return Judgement("allow", answer.reason, answer=chosen)


def describe_variables(names: Sequence[str]) -> str:
    """Describe the variables that commands have changed, for a question."""
    shown = ", ".join(to_line(name[:100]) for name in names[:VARIABLES_SHOWN])
    more = f" and {len(names) - VARIABLES_SHOWN} more" if len(names) > VARIABLES_SHOWN else ""
    what = f"Commands have changed variables for those that follow: {shown}{more}."
    return f"{what} What rules and earlier answers allow may be other programs with them. This is asked once."


def can_change(tool_call: ToolCall) -> bool:
    """Test whether a client may send another command with its answer."""
    return tool_call.kind == "execute" and isinstance(tool_call.arguments.get("command"), str)


async def keep(session: Session, permissions: SessionPermissions, answer: KeptAnswer) -> None:
    """Keep an answer, for the session at least."""
    if answer.scope != "session" and permissions.kept:
        try:
            if answer.allows and (sign := find_sign_of_crow(permissions.kept.file.parent)):
                raise ConfigError(f"another crow has started this one ({sign}), and its client may be a model.")
            await asyncio.to_thread(permissions.kept.add, answer)
            return
        except (ConfigError, OSError) as error:
            await session.notice(f"The answer holds for this session only: {error}", "warning")
    permissions.answers[:] = [*(each for each in permissions.answers if each.rule != answer.rule), answer]


async def preview(session: Session, tool_call: ToolCall) -> Sequence[ToolCallContent]:
    """Let the tool make the diff of an edit without writing it; empty if it cannot.

    A handler would write, so it does not run: it is not given a session. The file that another agent wants to write is
    shown as it will be.
    """
    server, text = tool_call.tool and tool_call.tool.server, tool_call.arguments.get("file_text")
    if server and server.source is None and isinstance(text, str):
        return [DiffContent(path=str(tool_call.arguments.get("path")), new_text=mask(text, session.secrets))]
    result = await session.toolbox.call(tool_call, session.meta(tool_call, **{"crow/dry_run": True}))
    content = to_update(result.mask(session.secrets), tool_call).content
    return [] if result.is_error or isinstance(content, msgspec.UnsetType) else content or []
