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
    """
from collections import Counter
sent, publish = Counter(), get_ipython().display_pub.publish
def count(*args, update=False, **options):
    sent["updates" if update else "shown"] += 1
    publish(*args, update=update, **options)
get_ipython().display_pub.publish = count

long = Agent(ScriptedModel([Reply("word " * 200, pace=0.002)]), store=False)
shown = long.stream("Count to 200.")
shown
""",
    """
result = await shown
await long.close()
print(repr(shown), sent["shown"], 2 <= sent["updates"] <= 60, len(result.text))
""",
    """
broken = Agent(ScriptedModel([Reply("Half", hang=True)]), store=False)
failed = broken.stream("Hello", timeout=0.3)
failed
""",
    """
try:
    await failed
except Exception as error:
    print(error)
await broken.close()
""",
    """
with sync(make("Shown by a thread.")) as blocking:
    display(blocking.stream("Go"))
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
    assert shown[3][0].startswith("word " * 200 + "\n\n<small>"), "the output of its cell is updated later"
    assert shown[4][0] == "<PromptStream, ended> 1 True 1000\n"
    assert shown[5][0].startswith("**")
    assert shown[5][0] == f"**{shown[6][0].strip()}**"
    assert shown[7][0].startswith("Shown by a thread.\n\n<small>")
