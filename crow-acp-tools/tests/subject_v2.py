"""An agent of ACP version 2, to test `crow acp check`: correct, or with one fault: `python subject_v2.py [FAULT]`.

It has one loop and no threads. A prompt that contains "Count" or "sleep" keeps it busy until it is cancelled or closed.
"""

import json
import os
import sys
from typing import Any

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
BUSY = ("Count", "sleep")


class SubjectError(Exception):
    def __init__(self, code: int, message: str) -> None:
        self.code, self.message = code, message


def say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def read() -> dict[str, Any]:
    """Read the next message; exit at the end of input."""
    for line in sys.stdin:
        try:
            message = json.loads(line)
        except ValueError:
            say({"id": None, "error": {"code": -32700, "message": "Parse error"}})
            continue
        if "method" in message or "result" in message or "error" in message:
            return message
        say({"id": None, "error": {"code": -32600, "message": "Invalid request"}})
    sys.exit()


class Subject:
    def __init__(self) -> None:
        self.shown: dict[str, list[dict[str, Any]]] = {}
        """The updates that a replay shows, by session."""
        self.folders: dict[str, str] = {}
        self.model, self.ids = "small", 0

    def make_id(self) -> str:
        self.ids += 1
        return f"{os.getpid()}-{self.ids}"

    def run(self) -> None:
        while True:
            self.take(read())

    def take(self, message: dict[str, Any]) -> None:
        if "method" not in message or "id" not in message:
            return
        id, method, params = message["id"], message["method"], message.get("params") or {}
        try:
            found = None if method[0] == "_" else getattr(self, method.replace("/", "_"), None)
            if found is None:
                raise SubjectError(-32601, f"Method not found: {method}")
            if method == "session/prompt":
                self.session_prompt(id, params)
            else:
                say({"id": id, "result": found(params)})
        except SubjectError as refusal:
            say({"id": id, "error": {"code": refusal.code, "message": refusal.message}})

    def initialize(self, params: dict[str, Any]) -> Any:
        if FAULT == "refuses other versions" and params["protocolVersion"] != 2:
            raise SubjectError(-32022, "Version 2 only")
        session = {"prompt": {"image": {}, "audio": {}, "embeddedContext": {}}, "delete": {}}
        result: dict[str, Any] = {
            "protocolVersion": 2,
            "info": {"name": "subject", "version": "2.0"},
            "capabilities": {"session": {**session, "additionalDirectories": {}}},
            "authMethods": [{"type": "agent", "methodId": "key", "name": "Key"}],
        }
        if FAULT == "is nobody":
            del result["info"]
        if FAULT == "lists capabilities":
            result["capabilities"] = ["session"]
        return result

    def auth_login(self, _: dict[str, Any]) -> Any:
        return {}

    auth_logout = auth_login

    def session_new(self, params: dict[str, Any]) -> Any:
        if "cwd" not in params:
            raise SubjectError(-32602, "cwd: missing")
        id = self.make_id()
        self.shown[id], self.folders[id] = [], params["cwd"]
        return {"sessionId": id, "configOptions": self.options()}

    def options(self) -> list[dict[str, Any]]:
        models = [{"value": "small", "name": "Small"}, {"value": "large", "name": "Large"}]
        current = "none" if FAULT == "has an impossible value" else self.model
        key = "id" if FAULT == "names options as version 1" else "configId"
        return [{"type": "select", key: "model", "name": "Model", "currentValue": current, "options": models}]

    def session_set_config_option(self, params: dict[str, Any]) -> Any:
        assert params["configId"] == "model"
        self.model = params["value"] if FAULT != "forgets what was set" else self.model
        return {"configOptions": self.options()}

    def update(self, session: str, kind: str, keep: bool = False, **fields: Any) -> None:
        update = {"sessionUpdate": kind, **fields}
        if keep:
            self.shown[session].append(update)
        say({"method": "session/update", "params": {"sessionId": session, "update": update}})

    def request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Send a request to the client; answer its messages meanwhile."""
        id = f"mine-{self.make_id()}"
        say({"id": id, "method": method, "params": params})
        while True:
            message = read()
            if message.get("id") == id and "method" not in message:
                return message
            self.take(message)

    def session_prompt(self, id: Any, params: dict[str, Any]) -> None:
        session, blocks = params["sessionId"], params["prompt"]
        if session not in self.shown:
            raise SubjectError(-32002, "No such session")
        message, text = self.make_id(), blocks[0]["text"]
        result = {"stopReason": "end_turn"} if FAULT == "answers as version 1" else {"messageId": message}
        say({"id": id, "result": result})
        shown = self.make_id() if FAULT == "shows another id" else message
        if FAULT != "hides the prompt":
            self.update(session, "user_message", keep=True, messageId=shown, content=blocks)
        if FAULT != "does not say that it runs":
            self.update(session, "state_update", state="running")
        if FAULT == "streams without ids":
            self.update(session, "agent_message_chunk", content={"type": "text", "text": "Hel"})
        if FAULT == "has an update of its own":
            self.update(session, "_mood", mood="fine")
        if FAULT == "has a reserved update":
            self.update(session, "mood", mood="fine")
        reason = "end_turn"
        if "Run the command" in text and "sleep" not in text:
            self.run_command(session)
        if any(word in text for word in BUSY):
            reason = self.stay_busy(session, "sleep" in text)
        if reason == "end_turn":
            self.speak(session)
        if FAULT != "never becomes idle":
            more = {} if FAULT == "gives no stop reason" else {"stopReason": reason}
            self.update(session, "state_update", state="idle", **more)
        if FAULT == "goes on after cancel" and reason == "cancelled":
            self.speak(session)
        self.keep(session)

    def speak(self, session: str) -> None:
        id, half = self.make_id(), {"type": "text", "text": "Hel"}
        self.update(session, "agent_message_chunk", messageId=id, content=half)
        self.update(session, "agent_message_chunk", messageId=id, content={"type": "text", "text": "lo."})
        text = {"type": "text", "text": "Hello."}
        self.shown[session].append({"sessionUpdate": "agent_message", "messageId": id, "content": [text]})

    def run_command(self, session: str) -> None:
        """Ask for permission and run a command, which a terminal shows."""
        call, terminal = self.make_id(), self.make_id()
        if FAULT != "invents terminals":
            self.update(session, "terminal_update", terminalId=terminal, command="echo crow", cwd="/")
        content = [{"type": "terminal", "terminalId": terminal}]
        self.update(session, "tool_call_update", toolCallId=call, title="echo", status="pending", content=content)
        if FAULT != "hides that it waits":
            self.update(session, "state_update", state="requires_action")
        subject = {"type": "command", "command": "echo crow", "cwd": "/", "toolCallId": call}
        options = [{"optionId": "once", "name": "Once", "kind": "allow_once"}]
        asked = {"sessionId": session, "title": "Run?", "subject": subject, "options": options}
        answer = self.request("session/request_permission", asked)
        assert answer["result"]["outcome"] == {"outcome": "selected", "optionId": "once"}, answer
        self.update(session, "state_update", state="running")
        output = {"data": "Y3Jvdwo="}
        if FAULT != "invents terminals":
            self.update(session, "terminal_update", terminalId=terminal, output=output, exitStatus={"exitCode": 0})
        if FAULT != "leaves calls open":
            self.update(session, "tool_call_update", toolCallId=call, status="completed")

    def stay_busy(self, session: str, calls: bool) -> str:
        """Stay busy until the turn or its tool call is cancelled; return the stop reason."""
        call = self.make_id()
        if calls:
            can = {"cancel": {}}
            self.update(session, "tool_call_update", toolCallId=call, status="in_progress", capabilities=can)
        while True:
            message = read()
            match message:
                case {"method": "session/cancel"} if FAULT == "ends as if done":
                    return "end_turn"
                case {"method": "session/cancel"}:
                    return "cancelled"
                case {"method": "session/close", "id": id}:
                    say({"id": id, "result": {}})
                    return "cancelled"
                case {"method": "tool_call/cancel", "id": id}:
                    say({"id": id, "result": {}})
                    status = {} if FAULT == "cancels no call" else {"status": "cancelled"}
                    self.update(session, "tool_call_update", toolCallId=call, **status)
                    return "end_turn"
                case _:
                    self.take(message)

    def keep(self, session: str) -> None:
        """Store a session, so that another process can resume it."""
        if FAULT != "forgets sessions":
            with open(os.path.join(self.folders[session], f".{session}.json"), "w", encoding="utf-8") as file:
                json.dump(self.shown[session], file)

    def session_resume(self, params: dict[str, Any]) -> Any:
        if (id := params["sessionId"]) not in self.shown:
            try:
                with open(os.path.join(params["cwd"], f".{id}.json"), encoding="utf-8") as file:
                    self.shown[id] = json.load(file)
            except FileNotFoundError:
                raise SubjectError(-32002, "No such session") from None
            self.folders[id] = params["cwd"]
        if params.get("replayFrom") or FAULT == "resumes aloud":
            for update in self.shown[id] if FAULT != "replays nothing" else []:
                more = {"messageId": self.make_id()} if FAULT == "renames messages" else {}
                self.update(id, update["sessionUpdate"], **more_of(update, more))
        self.update(id, "state_update", state="idle")
        return {}

    def session_list(self, params: dict[str, Any]) -> Any:
        wanted = None if FAULT == "lists all folders" else params.get("cwd")
        return {
            "sessions": [{"sessionId": id, "cwd": cwd} for id, cwd in self.folders.items() if wanted in (None, cwd)]
        }

    def session_delete(self, params: dict[str, Any]) -> Any:
        self.folders.pop(params["sessionId"], None)
        return {}

    def session_close(self, _: dict[str, Any]) -> Any:
        return {}


def more_of(update: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an update besides its kind, with others in place of some."""
    return {name: value for name, value in {**update, **more}.items() if name != "sessionUpdate"}


if __name__ == "__main__":
    Subject().run()
