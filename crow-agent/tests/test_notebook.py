"""Agents in a notebook, which has an event loop that runs already."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

CELLS = [
    """
from crow_agent import Agent, sync
from crow_core.acp.schema import AgentMessageChunk
from crow_core.testing import Reply, ScriptedModel

def make(*texts):
    return Agent(ScriptedModel([Reply(text) for text in texts]), store=False)

agent = make("**Four.**", "One two three.")
await agent.prompt("2 + 2?")
""",
    """
stream = agent.stream("Count.")
print("".join([update.content.text async for update in stream if isinstance(update, AgentMessageChunk)]))
stream.result
""",
    """
with sync(make("From a thread.", "Streamed.")) as blocking:
    result = blocking.prompt("Hello")
    print("".join(each.content.text for each in blocking.stream("Go") if isinstance(each, AgentMessageChunk)))
await agent.close()
result
""",
]


@pytest.mark.slow
def test_notebook_awaits_streams_and_shows_results_as_markdown(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "CROW_HOME", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(home))
    notebook: Any = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": home}}).execute()
    shown = [
        [output.get("text") or output["data"].get("text/markdown") for output in cell.outputs]
        for cell in notebook.cells
    ]
    assert shown[0][0].startswith("**Four.**\n\n<small>")
    assert shown[1][0] == "One two three.\n"
    assert shown[1][1].startswith("One two three.\n\n<small>")
    assert shown[2][0] == "Streamed.\n"
    assert shown[2][1].startswith("From a thread.\n\n<small>")
