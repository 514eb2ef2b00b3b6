"""The session with the agent: opened, prompted, and asked for what the user wants."""

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from crow_core.acp.complete_method import COMPLETE_METHOD, Completion, read_completions
from crow_core.acp.connection import ConnectionClosed, RpcError
from crow_core.acp.schema import (
    AvailableCommandsUpdate,
    ContentBlock,
    ListSessionsRequest,
    LoadSessionRequest,
    NewSessionResponse,
    PromptResponse,
    ResumeSessionRequest,
    SessionInfo,
    SessionNotification,
    SetSessionConfigOptionRequest,
)
from crow_core.acp.shared_methods import (
    BACKGROUND_METHOD,
    REWIND_METHOD,
    REWIND_POINTS_METHOD,
    STEERING_METHOD,
    is_taken,
    make_steering_params,
)
from crow_system.repository import find_folder_to_continue
from crow_system.shortening import format_count
from msgspec import UNSET
from msgspec.structs import replace

from crow_terminal import effects
from crow_terminal.agent_connections import NoAgent, connect
from crow_terminal.background_list import show_background
from crow_terminal.blocks import CommandOutput, describe_content
from crow_terminal.branch import read_branch
from crow_terminal.chat_base import ChatBase, get_time
from crow_terminal.chat_client import AgentQuestion, ChatClient
from crow_terminal.first_run import end_first_run, is_first_run, make_card
from crow_terminal.markdown import Prose
from crow_terminal.page_link import PageLink
from crow_terminal.permission import show_path
from crow_terminal.pickers import confirm_taking_back, offer_turns, pick_session, undo_turn
from crow_terminal.printable_text import escape_line
from crow_terminal.prompt_content import MAX_IMAGE_BYTES, find_large_images, make_prompt
from crow_terminal.rewind import describe_rewind
from crow_terminal.session_options import OfferedOptions, find_changes
from crow_terminal.settings import Left, Settings, find_last

START_TIMEOUT = 60.0
"""Seconds that an agent may take to answer `initialize`."""
TURNS_LIMIT = 50
"""Messages that `/rewind` offers."""


class AgentCalls(ChatBase):
    """The part of the terminal that calls the agent, and passes on what it sends."""

    def __init__(self, settings: Settings, left: Left | None = None) -> None:
        super().__init__(settings, left)
        self._folders: dict[str, str] = {}
        """The folders of the sessions that the agent has listed, by id."""
        self.link = PageLink(self)

    def _open(self, session: str = "", *, last: bool = False, again: bool = False) -> None:
        """Open a session, after the current one has been closed."""
        before = self._session_task
        if before:
            self.state.phase = "starting"  # what is typed from now on is for the next session
        self._session_task = asyncio.ensure_future(self._hold_session(before, session, last, again))

    async def _hold_session(self, before: "asyncio.Task[None] | None", session: str, last: bool, again: bool) -> None:
        """Connect to the agent and hold the connection until the session is left or the agent ends."""
        if before:
            before.cancel()
            await asyncio.wait([before])
            name = f"Session {escape_line(session)[:8]}" if session else "" if again else "New session"
            self.perform(self.state.leave_session(name, again=again and bool(session)))
        if self._is_first is None:
            find = self.settings.history if self.settings.agent.name == "crow" else None
            self._is_first = bool(find) and await asyncio.to_thread(is_first_run, find)
        try:
            link = await connect(self.settings.agent, self.settings.cwd)
        except NoAgent as error:
            self.perform(self.state.end_agent(str(error), time.monotonic()))
            return
        self.client = client = ChatClient(link.transport, self._receive, self._ask, self._withdraw)
        problem, login = "", None
        try:
            async with client.serving():
                try:
                    await self._open_session(client, session, last)
                except TimeoutError:
                    problem = f"{self.settings.agent.name} did not answer within {START_TIMEOUT:g} seconds."
                except RpcError as error:
                    problem = client.describe_error(error)
                    login = client.find_login(error)
                except ConnectionClosed:
                    pass
                if not problem:
                    await client.until_closed()
                    problem = await link.describe_end()
        finally:
            self.client = None
        self.perform(self.state.end_agent(problem, time.monotonic(), login))

    async def _open_session(self, client: ChatClient, session: str, last: bool) -> None:
        async with asyncio.timeout(START_TIMEOUT):
            self.state.abilities = await client.start(
                self.settings.agent.version, logs_in=bool(self.settings.agent.command)
            )
        if last and self.state.abilities.lists:
            stored = await self._list_stored(client)
            session = find_last(stored, self.settings.cwd)
        await self._enter_folder(session)
        cwd = self.settings.cwd
        can, find, loaded = self.state.abilities, self.settings.history, NewSessionResponse(session_id="")
        if session and not (can.loads or can.resumes):
            self.perform(self.state.remark("This agent keeps no sessions: it has forgotten what was said.", "warning"))
            session = ""
        if session:
            self.state.loading, self.session_id = not self.state.muted, session
            try:
                if self.state.muted and can.resumes:
                    loaded = await client.request("session/resume", ResumeSessionRequest(session_id=session, cwd=cwd))
                else:
                    loaded = await client.request("session/load", LoadSessionRequest(session_id=session, cwd=cwd))
            except RpcError as error:
                sentence = f"{client.describe_error(error)} This is a new session."
                self.perform(self.state.remark(sentence, "error"))
                session = ""
        if not session:
            loaded = await client.new_session(cwd)
            self.session_id = loaded.session_id
        options = OfferedOptions(loaded.modes or None, loaded.config_options or [])
        for change in [] if session else find_changes(self.state.options, options):
            try:
                await self._set_option(client, options, change)
            except RpcError as error:  # the session has its own default then
                self.perform(self.state.remark(client.describe_error(error), "error"))
        self._is_used = bool(session)
        if self._is_first and find and await asyncio.to_thread(end_first_run, find):
            self.perform([effects.Show(Prose(make_card(options)))])
        self._is_first = False
        self.link.reload(restarted=True)
        self.perform(self.state.open_session(options.modes, options.config, time.monotonic()))
        if self._choose:
            self._choose = False
            self._start(self._list_sessions())

    def _receive(self, notification: SessionNotification) -> None:
        self.link.receive(notification)
        if notification.session_id == self.session_id or not self.session_id:
            self.perform(self.state.receive(notification.update, time.monotonic()))
            if isinstance(notification.update, AvailableCommandsUpdate) and self.terminal.editor.text.startswith("/"):
                self.terminal.editor.start_completion()  # of what was typed before they were known

    def _ask(self, id: int, request: AgentQuestion) -> None:
        if self.link.ask(id, request):
            self.perform(self.state.ask(id, request, get_time()))

    def _withdraw(self, id: int) -> None:
        self.link.end_question(id)
        self.perform(self.state.withdraw(id, get_time()))

    async def _prompt(self, text: str, outputs: Sequence[CommandOutput]) -> None:
        client = self.client
        if client is None:
            return
        self._is_used = True
        blocks = await self._make_prompt(text, outputs)
        with suppress(RpcError, ConnectionClosed):  # the terminal has shown an error, or its task tells the end
            await self._run_turn(client, blocks)

    async def prompt_for_page(self, client: ChatClient, blocks: Sequence[ContentBlock]) -> PromptResponse:
        """Run a turn with a prompt of the page. Raises RpcError, ConnectionClosed."""
        self._is_used = True
        self.perform(self.state.begin_turn("\n".join(map(describe_content, blocks)), time.monotonic()))
        return await self._run_turn(client, blocks, from_page=True)

    async def _run_turn(
        self, client: ChatClient, blocks: Sequence[ContentBlock], *, from_page: bool = False
    ) -> PromptResponse:
        self.link.begin_turn(blocks, from_page=from_page)
        reason = ""
        try:
            response = await client.prompt(self.session_id, blocks)
            reason = response.stop_reason
        except RpcError as error:
            self.perform(self.state.fail_turn(client.describe_error(error), time.monotonic()))
            raise
        finally:
            self.link.end_turn(reason, from_page=from_page)
        self.perform(self.state.end_turn(response, time.monotonic()))
        return response

    async def _make_prompt(self, text: str, outputs: Sequence[CommandOutput]) -> list[ContentBlock]:
        images = [image for words, image in self.images.items() if words in text]
        if images and not self.state.abilities.images:
            self.perform(self.state.remark("This agent takes no images: it gets the text alone.", "warning"))
        elif large := await asyncio.to_thread(find_large_images, text, self.settings.cwd):
            limit = f"larger than {MAX_IMAGE_BYTES // 1_000_000} MB: the agent gets the path alone"
            self.perform(self.state.remark(f"{', '.join(map(escape_line, large))}: {limit}.", "warning"))
        return await asyncio.to_thread(make_prompt, text, outputs, self.settings.cwd, self.state.abilities, images)

    async def complete_by_agent(self, text: str) -> Sequence[Completion]:
        """Return what may follow the text before the cursor, as far as the agent knows."""
        if not (self.client and self.session_id and self.state.abilities.completes):
            return []
        try:
            answer = await self.client.request(COMPLETE_METHOD, {"sessionId": self.session_id, "text": text})
        except (RpcError, ConnectionClosed):
            return []  # the user goes on typing
        return read_completions(answer, text)

    async def _steer(self, words: effects.Steer) -> None:
        taken = False
        try:
            if client := self.client:
                blocks = await self._make_prompt(words.text, words.outputs)
                params = make_steering_params(self.session_id, blocks)
                taken = is_taken(await client.request(STEERING_METHOD, params))
        except RpcError:
            pass  # withdrawn; or they are sent as a prompt, whose answer says what is wrong
        except ConnectionClosed:
            return  # the end of the connection is told by its own task
        self.perform(self.state.end_steer(words, taken, time.monotonic()))

    def _withdraw_words(self) -> None:
        if self.client:
            self.client.connection.cancel_requests(STEERING_METHOD)

    async def _cancel(self) -> None:
        if self.client:
            await self.client.cancel(self.session_id)

    async def _call_background(self, wanted: effects.CallBackground) -> None:
        if not self.client:
            return
        params = {"sessionId": self.session_id, "action": wanted.action, "name": wanted.name, "text": wanted.text}
        if wanted.action == "tell":
            self.state.show_hint("It reads your words at its next step.", time.monotonic())
        try:
            answer = await self.client.request(BACKGROUND_METHOD, params)
        except RpcError as error:
            self.perform(self.state.remark(self.client.describe_error(error), "warning"))
            return
        if wanted.action == "send":
            self.perform(self.state.end_send(len(answer["sent"]), time.monotonic()))
        else:
            said = answer.get("said")
            shown = self.state.remark(str(said)) if said else show_background(self.state, answer["work"])
            self.perform(shown)

    async def _log_in(self, args: Sequence[str], env: Mapping[str, str]) -> None:
        """Run the agent's command with more arguments, which log in, and open the session again."""
        from crow_terminal.outside import run  # imports a part of prompt_toolkit that few sessions need

        await run([*self.settings.agent.command, *args], self.settings.cwd, {**os.environ, **env})
        self._open(self.session_id, again=True)

    async def _set_option(self, client: ChatClient, options: OfferedOptions, change: effects.SetOption) -> None:
        id, value = change.id, change.value
        if not id:
            await client.set_mode(self.session_id, str(value))
            options.set_mode(str(value))
        else:
            kind = "boolean" if isinstance(value, bool) else UNSET
            request = SetSessionConfigOptionRequest(session_id=self.session_id, config_id=id, value=value, type=kind)
            answer = await client.request("session/set_config_option", request)
            options.take(answer.config_options)
        self.link.send_options()
        self.terminal.update()

    async def _list_stored(self, client: ChatClient) -> Sequence[SessionInfo]:
        """List the stored sessions of the folder, the latest first."""
        answer = await client.request("session/list", ListSessionsRequest(cwd=self.settings.cwd))
        self._folders |= {one.session_id: one.cwd for one in answer.sessions}
        return answer.sessions

    async def _enter_folder(self, session: str) -> None:
        """Go on in the folder of a listed session, if that is in another work tree of the same repository."""
        here = self.settings.cwd
        folder = await asyncio.to_thread(find_folder_to_continue, self._folders.get(session, here), here)
        if folder != here:
            self.settings = replace(self.settings, cwd=folder, has_moved=True)
            self.state.folder = self.left.folder = folder
            self.perform(self.state.remark(f"This session works in {show_path(folder, here)}."))
            self._start(self._find_branch())

    async def _find_branch(self) -> None:
        """Find the branch that is checked out, for the footer."""
        self.state.branch = await asyncio.to_thread(read_branch, self.settings.cwd)
        self.terminal.update()

    async def _list_sessions(self) -> None:
        if self.client:
            others = [one for one in await self._list_stored(self.client) if one.session_id != self.session_id]
            self.perform(pick_session(self.state, others, datetime.now().astimezone()))

    async def _list_turns(self, last: bool) -> None:
        if self.client:
            answer = await self.client.request(REWIND_POINTS_METHOD, {"sessionId": self.session_id})
            points = answer["points"][: -TURNS_LIMIT - 1 : -1]
            self._turn_ids = [each["messageId"] for each in points]
            take = undo_turn if last else offer_turns
            self.perform(take(self.state, list(map(find_typed_text, points))))

    async def _take_back(self, wanted: effects.TakeBack) -> None:
        if not self.client:
            return
        turns, folder = wanted.turns, self.settings.cwd
        params = {"sessionId": self.session_id, "messageId": self._turn_ids[turns - 1], "mode": "both"}
        keep = {"_meta": {"crow": {"keep": True}}} if wanted.keep else {}
        answer = await self.client.request(REWIND_METHOD, {**params, **keep, "dryRun": not wanted.confirmed})
        own = answer.get("_meta", {}).get("crow", {})
        if (why := answer["files"].get("error")) and (wanted.confirmed or not own.get("kept")):
            self.perform(self.state.remark(f"{why} Nothing was taken back.", "warning"))
        elif wanted.confirmed:
            files = ", ".join(show_path(path, folder) for path in answer["files"]["filesChanged"])
            what = f"files as before: {files}" if files else "no file had to change"
            stays = ", ".join(map(str, own.get("stays", [])))
            what += f"; not taken back: {stays}" if stays and not files else ""
            self.link.reload()
            back = " `/redo` brings it back." if any(one.name == "redo" for one in self.state.commands) else ""
            count = format_count(turns, "message")
            self.perform(self.state.take_back(turns, f"Took back {count}; {what}.{back}"))
        elif not (own.get("changes") or answer["files"].get("filesChanged") or own.get("kept")):
            await self._take_back(replace(wanted, confirmed=True))  # `/redo` brings it back
        else:
            about = describe_rewind(answer, folder)
            self.perform(confirm_taking_back(self.state, turns, about, keep=bool(why)))


def find_typed_text(point: dict[str, Any]) -> str:
    """Find what the user typed in a message of `_session/rewind_points`: crow names it apart from what goes with it."""
    match point:
        case {"_meta": {"crow": {"texts": [*_, str(last)]}}}:
            return last
        case _:
            return str(point["text"])
