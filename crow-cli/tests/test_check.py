"""`crow acp check`: an agent that is right passes, and whatever is wrong is found under its own id."""

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from crow_cli.check import validity
from crow_cli.check.examination import Report, examine
from crow_cli.check.report import as_json, as_text
from crow_cli.check.requirements import REQUIREMENTS
from crow_cli.check.talk import Options
from crow_core.acp.schema import AGENT_METHODS, CLIENT_METHODS
from crow_core.testing import Reply, ScriptedServer, ToolCall
from jsonschema import Draft202012Validator

if TYPE_CHECKING:
    from conftest import Ear, Machine

pytestmark = pytest.mark.anyio

SUBJECT = (sys.executable, "-I", "-S", str(Path(__file__).with_name("subject.py")))

FAULTS: dict[str, set[str]] = {
    "prints a banner": {"TRANSPORT-001"},
    "logs to standard output": {"TRANSPORT-001"},
    "prints an empty line": {"TRANSPORT-001"},
    "sends a batch": {"TRANSPORT-001"},
    "says goodbye": {"TRANSPORT-001"},
    "has no last newline": {"TRANSPORT-001"},
    "writes Latin-1": {"TRANSPORT-002"},
    "turns ids to text": {"JSONRPC-001", "INIT-001"},
    "numbers its answers": {"JSONRPC-001"},
    "drops id 0": {"JSONRPC-001"},
    "answers twice": {"JSONRPC-001"},
    "gives result and error": {"JSONRPC-002"},
    "gives neither": {"JSONRPC-002", "JSONRPC-005", "SESSION-001"},
    "names errors": {"JSONRPC-002"},
    "has bare errors": {"JSONRPC-002"},
    "answers notifications": {"JSONRPC-003"},
    "has one code for all": {"JSONRPC-004"},
    "leaves after an error": {"JSONRPC-005"},
    "refuses initialize": {"INIT-001"},
    "gives invalid capabilities": {"INIT-001", "SCHEMA-001"},
    "speaks version 2": {"INIT-002"},
    "agrees to every version": {"INIT-003"},
    "refuses other versions": {"INIT-003"},
    "is nobody": {"INIT-004"},
    "sends bare text": {"SCHEMA-001", "PROMPT-002"},
    "invents updates": {"SCHEMA-001", "PROMPT-002"},
    "invents methods": {"SCHEMA-001"},
    "adds its own keys": {"SCHEMA-002"},
    "offers the same login twice": {"AUTH-001"},
    "offers a terminal login": {"AUTH-002"},
    "never lets in": {"AUTH-003"},
    "refuses logout": {"AUTH-004"},
    "wants a login and offers none": {"AUTH-005", "SESSION-001"},
    "refuses session/new": {"SESSION-001"},
    "gives empty ids": {"SESSION-001", "SESSION-002"},
    "has one session": {"SESSION-002"},
    "refuses session/prompt": {"PROMPT-001"},
    "ends in its own words": {"PROMPT-001", "SCHEMA-001"},
    "does not answer prompts": {"PROMPT-001"},
    "writes elsewhere": {"PROMPT-002"},
    "refuses resource_link": {"PROMPT-003"},
    "fails when cancelled": {"CANCEL-001", "CLOSE-002"},
    "ends as if done": {"CANCEL-001", "CLOSE-002"},
    "ignores cancel": {"CANCEL-001"},
    "goes on after cancel": {"CANCEL-002"},
    "refuses session/load": {"LOAD-001"},
    "replays too late": {"LOAD-002"},
    "replays nothing": {"LOAD-002"},
    "loads null": {"LOAD-003"},
    "needs mcpServers": {"RESUME-001"},
    "resumes aloud": {"RESUME-002"},
    "refuses session/list": {"LIST-001", "LIST-002"},
    "lists null": {"LIST-001", "LIST-002", "SCHEMA-001"},
    "lists all folders": {"LIST-002"},
    "refuses session/delete": {"DELETE-001", "DELETE-002"},
    "keeps what is deleted": {"DELETE-001"},
    "deletes what is there only": {"DELETE-002"},
    "refuses session/close": {"CLOSE-001"},
    "takes no folders": {"ADDDIRS-001"},
    "dreams of a mode": {"MODES-001"},
    "refuses session/set_mode": {"MODES-002"},
    "misnames the mode": {"MODES-002", "SCHEMA-001"},
    "has an impossible value": {"CONFIG-001"},
    "gives what was set only": {"CONFIG-002"},
    "forgets what was set": {"CONFIG-002"},
    "offers a switch": {"CONFIG-003"},
    "refuses image": {"PROMPTCAP-001"},
    "refuses audio": {"PROMPTCAP-002"},
    "refuses resource": {"PROMPTCAP-003"},
    "reads the client's files": {"CLIENTCAP-001"},
    "uses the client's terminal": {"CLIENTCAP-002"},
    "questions the client": {"CLIENTCAP-003"},
    "ignores extensions": {"EXT-001"},
    "refuses _meta": {"META-001"},
    "explains at length": {"ERROR-001"},
    "does not leave": {"SHUTDOWN-001"},
}
"""What is wrong with an agent, and the ids that have to say so."""
