"""An ACP agent to test `crow acp check`: correct, or with one fault: `python subject.py [FAULT]`.

It has one loop and no threads. A prompt that contains "Count" keeps it busy until it is cancelled or closed.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from typing import Any

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
MODES = {"currentModeId": "ask", "availableModes": [{"id": "ask", "name": "Ask"}, {"id": "do", "name": "Do"}]}
JUNK = [None, True, 0, -1, 1.5, "", "x", [], {}, [{}], {"a": 1}, {"sessionId": []}, "\x1b[2J\n", [[[]]], {"code": {}}]
"""Values that the agent with the fault "babbles" sends."""
CAPABILITIES: dict[str, Any] = {
    "loadSession": True,
    "promptCapabilities": {"image": True, "audio": True, "embeddedContext": True},
    "sessionCapabilities": {"list": {}, "delete": {}, "resume": {}, "close": {}, "additionalDirectories": {}},
    "auth": {"logout": {}},
}


class SubjectError(Exception):
    def __init__(self, code: int, message: str) -> None:
        self.code, self.message = code, message


def write(raw: bytes) -> None:
    sys.stdout.buffer.write(raw)
    sys.stdout.buffer.flush()


def say(message: dict[str, Any]) -> None:
    write(json.dumps({"jsonrpc": "2.0", **message}, ensure_ascii=False).encode() + b"\n")


def read() -> dict[str, Any]:
    """Read the next message; exit at the end of input."""
    for line in sys.stdin.buffer:
        try:
            message = json.loads(line)
        except ValueError:
            say({"id": None, "error": {"code": -32700, "message": "Parse error"}})
            continue
        if "method" in message or "result" in message or "error" in message:
            return message
        say({"id": None, "error": {"code": -32600, "message": "Invalid request"}})
    leave()
    raise AssertionError


def leave() -> None:
    if FAULT == "says goodbye":
        write(b"Goodbye!\n")
    if FAULT == "has no last newline":
        write(b'{"jsonrpc":"2.0","method":"_bye"}')
    if FAULT == "does not leave":
        time.sleep(600)
    sys.exit()


class SubjectAgent:
    def __init__(self) -> None:
        self.sessions: dict[str, list[dict[str, Any]]] = {}
        self.folders: dict[str, str] = {}
        self.options: dict[str, str] = {"mode": "ask", "model": "small"}
        self.asked = 0

    def run(self) -> None:
        while True:
            self.take(read())

    def take(self, message: dict[str, Any]) -> None:
        """Answer one message."""
        if "method" not in message:
            return
        id, method, params = message.get("id"), message["method"], message.get("params") or {}
        if "id" not in message:
            if FAULT == "answers notifications":
                say({"id": None, "error": {"code": -32601, "message": "Method not found"}})
            return
        if method == "initialize":
            self.begin()
        try:
            result = self.answer(method, params)
        except SubjectError as refusal:
            self.refuse(id, refusal)
        else:
            self.reply(id, method, result)

    def reply(self, id: Any, method: str, result: Any) -> None:
        match FAULT:
            case "babbles":
                self.babble(id, method, result)
            case "turns ids to text":
                say({"id": str(id), "result": result})
            case "numbers its answers" if isinstance(id, str):
                say({"id": 0, "result": result})
            case "drops id 0" if id == 0:
                pass
            case "answers twice":
                say({"id": id, "result": result})
                say({"id": id, "result": result})
            case "gives result and error":
                say({"id": id, "result": result, "error": None})
            case "gives neither" if method == "session/new":
                say({"id": id})
            case _:
                say({"id": id, "result": result})

    def babble(self, id: Any, method: str, result: Any) -> None:
        """Answer with random messages, most of them nearly valid."""
        for _ in range(random.randrange(3)):
            some = {"sessionId": random.choice(["session-0", *JUNK]), "update": random.choice(JUNK)}
            what = random.choice(["session/update", "session/request_permission", *JUNK])
            call = {"method": what, "params": random.choice([some, *JUNK])}
            say(call if random.random() < 0.5 else {"id": random.choice(JUNK), **call})
        if isinstance(result, dict) and random.random() < 0.7:
            spoiled = random.choice([*result, "more"])
            result = {**result, spoiled: random.choice(JUNK)} if random.random() < 0.5 else result
            say({"id": id, "result": result})
        else:
            what = random.choice(["result", "error", "result"])
            say({"id": random.choice([id, id, id, *JUNK]), what: random.choice(JUNK)})

    def refuse(self, id: Any, refusal: SubjectError) -> None:
        error: dict[str, Any] = {"code": refusal.code, "message": refusal.message}
        match FAULT:
            case "names errors":
                error["code"] = "invalid"
            case "explains at length":
                error["message"] += "\nTraceback:\n  here"
            case "has bare errors":
                error = {"code": refusal.code}
            case _:
                pass
        say({"id": id, "error": error})
        if FAULT == "leaves after an error":
            sys.exit(1)

    def begin(self) -> None:
        match FAULT:
            case "prints a banner":
                write(b"Welcome to the agent!\n")
            case "logs to standard output":
                write(b'{"level": "info", "message": "starting"}\n')
            case "prints an empty line":
                write(b"\n")
            case "sends a batch":
                write(b'[{"jsonrpc":"2.0","method":"_hello"}]\n')
            case "writes Latin-1":
                write('{"jsonrpc":"2.0","method":"_é"}\n'.encode("latin-1"))
            case "exits":
                sys.exit(3)
            case "hangs":
                time.sleep(600)
            case "hangs and is deaf":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(600)
            case "floods":
                while True:
                    write(b'{"jsonrpc":"2.0","method":"_flood"}\n' * 1000)
            case "floods with junk":
                while True:
                    write(os.urandom(1 << 16))
            case "begins a line and never ends it":
                while True:
                    write(b"a" * (1 << 16))
            case "floods standard error":
                while True:
                    os.write(2, b"Oh no!\n" * 1000)
            case "nests deeply":
                write(b'{"jsonrpc":"2.0","method":"session/update","params":' + b'{"update":' * 9000 + b"\n")
                write(b'{"jsonrpc":"2.0","id":' + b"[" * 600 + b"]" * 600 + b',"result":1}\n')
            case "closes its input":
                os.close(0)
            case "leaves a child behind":
                subprocess.Popen(["sleep", "600"], start_new_session=True, stdin=subprocess.DEVNULL, close_fds=False)
            case "steers the terminal":
                write("\x1b]0;owned\x07\u202e\n".encode())
                os.write(2, b"\x1b[2J")
            case _:
                pass

    def answer(self, method: str, params: dict[str, Any]) -> Any:
        if FAULT == "asks for everything":
            for _ in range(1000):
                self.request("fs/read_text_file", {"sessionId": "x", "path": "/etc/passwd"})
        if f"answers {method} too late" == FAULT:
            for _ in sys.stdin.buffer:  # until the client has given up
                pass
        if FAULT == "takes its time":
            time.sleep(0.35)  # the fault itself: an agent that is slow
        if f"never answers {method}" == FAULT:
            self.take(read())
        if f"refuses {method}" == FAULT:
            raise SubjectError(-32603, f"Not today: {method}")
        if method.startswith("_"):
            if FAULT == "ignores extensions":
                self.take(read())
            raise SubjectError(-32603 if FAULT == "has one code for all" else -32601, f"Method not found: {method}")
        found = getattr(self, method.replace("/", "_"), None)
        if found is None:
            raise SubjectError(-32601, f"Method not found: {method}")
        return found(params)

    def initialize(self, params: dict[str, Any]) -> Any:
        version = params["protocolVersion"]
        result: dict[str, Any] = {
            "protocolVersion": 1,
            "agentCapabilities": CAPABILITIES,
            "authMethods": [{"id": "key", "name": "Key", "type": "agent"}, {"id": "other", "name": "Other"}],
            "agentInfo": {"name": "subject", "version": "1.0"},
        }
        match FAULT:
            case "speaks version 2":
                result["protocolVersion"] = 2
            case "agrees to every version":
                result["protocolVersion"] = version
            case "refuses other versions" if version != 1:
                raise SubjectError(-32602, "No such version")
            case "gives invalid capabilities":
                result["agentCapabilities"] = ["loadSession"]
            case "is nobody":
                del result["agentInfo"]
            case "adds its own keys":
                result["flavour"] = "strange"
            case "offers a terminal login":
                result["authMethods"] += [{"type": "terminal", "id": "t", "name": "T", "args": ["login"]}]
            case "offers the same login twice":
                result["authMethods"] *= 2
            case "wants a login and offers none":
                result["authMethods"] = []
            case "can do nothing":
                del result["agentCapabilities"], result["authMethods"]
            case _:
                pass
        return result

    def authenticate(self, params: dict[str, Any]) -> Any:
        if params["methodId"] != "key":
            raise SubjectError(-32602, "No such method")
        self.options["user"] = "somebody"
        return {}

    def logout(self, _: dict[str, Any]) -> Any:
        return {}

    def session_new(self, params: dict[str, Any]) -> Any:
        if "cwd" not in params:
            raise SubjectError(-32602, "cwd: missing")
        if FAULT in ("wants a login and offers none", "never lets in") or (
            FAULT == "wants a login" and "user" not in self.options
        ):
            raise SubjectError(-32000, "Login required")
        if FAULT == "takes no folders" and params.get("additionalDirectories"):
            raise SubjectError(-32602, "One folder, please")
        id = f"session-{len(self.sessions)}" if FAULT != "has one session" else "session-0"
        id = "" if FAULT == "gives empty ids" else id
        self.sessions[id], self.folders[id] = [], params["cwd"]
        if FAULT == "can do nothing":
            return {"sessionId": id}
        modes = {**MODES, "currentModeId": "dream"} if FAULT == "dreams of a mode" else MODES
        return {"sessionId": id, "modes": modes, "configOptions": self.config_options()}

    def config_options(self) -> list[dict[str, Any]]:
        current = "none" if FAULT == "has an impossible value" else self.options["model"]
        models = [{"value": "small", "name": "Small"}, {"value": "large", "name": "Large"}]
        modes = [{"value": "ask", "name": "Ask"}, {"value": "do", "name": "Do"}]
        options: list[dict[str, Any]] = [
            {
                "type": "select",
                "id": "model",
                "name": "Model",
                "category": "model",
                "currentValue": current,
                "options": [{"group": "all", "name": "All", "options": models}],
            },
            {"type": "select", "id": "mode", "name": "Mode", "currentValue": self.options["mode"], "options": modes},
        ]
        if FAULT == "offers a switch":
            options.append({"type": "boolean", "id": "fast", "name": "Fast", "currentValue": True})
        return options

    def session_set_mode(self, params: dict[str, Any]) -> Any:
        name = "modeId" if FAULT == "misnames the mode" else "currentModeId"
        self.update(params["sessionId"], {"sessionUpdate": "current_mode_update", name: params["modeId"]})
        return {}

    def session_set_config_option(self, params: dict[str, Any]) -> Any:
        if FAULT != "forgets what was set":
            self.options[params["configId"]] = params["value"]
        return {"configOptions": self.config_options()[1 if FAULT == "gives what was set only" else 0 :]}

    def update(self, session: str, update: dict[str, Any], *, keep: bool = False) -> None:
        if keep:
            self.sessions[session].append(update)
        say({"method": "session/update", "params": {"sessionId": session, "update": update}})

    def chunk(self, session: str, text: str, who: str = "agent") -> None:
        content: Any = text if FAULT == "sends bare text" else {"type": "text", "text": text}
        self.update(session, {"sessionUpdate": f"{who}_message_chunk", "content": content}, keep=True)

    def request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """Send a request to the client; answer its messages meanwhile."""
        self.asked += 1
        id = f"mine-{self.asked}"
        say({"id": id, "method": method, "params": params})
        while True:
            message = read()
            if message.get("id") == id and "method" not in message:
                return message
            self.take(message)

    def session_prompt(self, params: dict[str, Any]) -> Any:
        session, blocks = params["sessionId"], params["prompt"]
        if session not in self.sessions:
            raise SubjectError(-32002, "No such session")
        kinds = {block["type"] for block in blocks}
        for kind in ("image", "audio", "resource", "resource_link"):
            if f"refuses {kind}" == FAULT and kind in kinds:
                raise SubjectError(-32602, f"What is a {kind}?")
        if FAULT == "refuses _meta" and "_meta" in params:
            raise SubjectError(-32602, "What is _meta?")
        self.sessions[session].append({"sessionUpdate": "user_message_chunk", "content": blocks[0]})
        text = blocks[0]["text"]
        if FAULT == "writes elsewhere":
            self.sessions["elsewhere"] = []
            self.chunk("elsewhere", "Hello.")
        if FAULT == "invents updates":
            self.update(session, {"sessionUpdate": "mood", "mood": "fine"})
        if FAULT == "invents methods":
            say({"method": "agent/mood", "params": {}})
        if FAULT == "does not answer prompts":
            while True:
                self.take(read())
        if "Count" in text and FAULT != "is too quick":
            return self.count(session)
        if "Read the file" in text and FAULT == "reads the client's files":
            self.request("fs/read_text_file", {"sessionId": session, "path": "/notes.txt"})
        if "Run the command" in text:
            self.run_command(session)
        if "Ask me" in text and FAULT == "questions the client":
            schema = {"type": "object", "properties": {"colour": {"type": "string"}}}
            form = {"mode": "form", "message": "Which?", "sessionId": session, "requestedSchema": schema}
            self.request("elicitation/create", form)
        self.chunk(session, "Hello.")
        self.keep(session)
        return {"stopReason": "done" if FAULT == "ends in its own words" else "end_turn"}

    def run_command(self, session: str) -> None:
        if FAULT == "uses the client's terminal":
            self.request("terminal/create", {"sessionId": session, "command": "echo crow"})
        call = {"toolCallId": "call-1", "title": "echo crow", "kind": "execute", "status": "pending"}
        self.update(session, {"sessionUpdate": "tool_call", **call}, keep=True)
        options = [
            {"optionId": "always", "name": "Always", "kind": "allow_always"},
            {"optionId": "once", "name": "Once", "kind": "allow_once"},
            {"optionId": "no", "name": "No", "kind": "reject_once"},
        ]
        asked = {"sessionId": session, "toolCall": {"toolCallId": "call-1"}, "options": options}
        answer = self.request("session/request_permission", asked)
        assert answer["result"]["outcome"] == {"outcome": "selected", "optionId": "once"}, answer
        end = {"sessionUpdate": "tool_call_update", "toolCallId": "call-1", "status": "completed"}
        self.update(session, end, keep=True)

    def count(self, session: str) -> Any:
        """Stay busy until cancelled or closed."""
        self.chunk(session, "one")
        while True:
            message = read()
            match message:
                case {"method": "session/cancel"}:
                    return self.stop(session)
                case {"method": "session/close", "id": id}:
                    say({"id": id, "result": {}})
                    return self.stop(session)
                case _:
                    self.take(message)

    def stop(self, session: str) -> Any:
        match FAULT:
            case "fails when cancelled":
                raise SubjectError(-32603, "AbortError")
            case "ends as if done":  # later than an agent would that had ended before it read of the cancel
                time.sleep(1.2)
                return {"stopReason": "end_turn"}
            case "ignores cancel":
                return self.count(session)
            case "goes on after cancel":
                say({"id": 3, "result": {"stopReason": "cancelled"}})
                self.chunk(session, "two")
                self.run()
            case _:
                pass
        return {"stopReason": "cancelled"}

    def session_cancel(self, _: dict[str, Any]) -> Any:
        return None

    def keep(self, session: str) -> None:
        """Store a session, so that another process can load it."""
        if session in self.folders and FAULT != "forgets sessions":
            with open(os.path.join(self.folders[session], f".{session}.json"), "w", encoding="utf-8") as file:
                json.dump(self.sessions[session], file)

    def session_load(self, params: dict[str, Any]) -> Any:
        if (id := params["sessionId"]) not in self.sessions:
            try:
                with open(os.path.join(params["cwd"], f".{id}.json"), encoding="utf-8") as file:
                    self.sessions[id] = json.load(file)
            except FileNotFoundError:
                raise SubjectError(-32002, "No such session") from None
        if FAULT not in ("replays too late", "replays nothing"):
            self.replay(params["sessionId"])
        if FAULT == "replays too late":
            say({"id": 4, "result": {}})
            self.replay(params["sessionId"])
            self.run()
        return None if FAULT == "loads null" else {}

    def replay(self, session: str) -> None:
        for update in self.sessions[session]:
            self.update(session, update)

    def session_resume(self, params: dict[str, Any]) -> Any:
        if FAULT == "needs mcpServers" and "mcpServers" not in params:
            raise SubjectError(-32602, "mcpServers: missing")
        if FAULT == "resumes aloud":
            self.replay(params["sessionId"])
        return {}

    def session_list(self, params: dict[str, Any]) -> Any:
        wanted = None if FAULT == "lists all folders" else params.get("cwd")
        if FAULT == "lists null":
            return {"sessions": None}
        sessions = [
            {"sessionId": id, "cwd": cwd} for id, cwd in self.folders.items() if wanted is None or cwd == wanted
        ]
        return {"sessions": sessions}

    def session_delete(self, params: dict[str, Any]) -> Any:
        if FAULT == "deletes what is there only" and params["sessionId"] not in self.folders:
            raise SubjectError(-32002, "No such session")
        if FAULT != "keeps what is deleted":
            self.folders.pop(params["sessionId"], None)
        return {}

    def session_close(self, _: dict[str, Any]) -> Any:
        return {}


if __name__ == "__main__":
    if len(sys.argv) > 2:  # a named pipe, which this process and all its children hold open
        held = os.open(sys.argv[2], os.O_WRONLY)
        os.set_inheritable(held, True)
        os.write(held, b"started\n")
    SubjectAgent().run()
