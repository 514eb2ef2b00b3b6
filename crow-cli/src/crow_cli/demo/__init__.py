"""`crow demo`: fix a bug in a small project, with a script in place of the model."""

import asyncio
import shutil
import tempfile
from collections.abc import Mapping
from importlib.resources import as_file, files

import click
from crow_agent.app import build
from crow_core.models.chat_model import ChatModel
from crow_core.testing import ScriptedServer
from crow_extensions.ask_user import ask_user
from crow_persistence.extension import persistence

from crow_cli.demo.demo_script import TASK, TESTS_COMMAND, next_reply
from crow_cli.run import RunOptions, find_terminal, run

SCRIPTED_NOTICE = (
    "The model here is a script, served on this machine; crow, its tools, the files and the tests are real."
)


async def run_demo(env: Mapping[str, str], model: str = "") -> int:
    """Fix the bug in a copy of the demo's project. Return 0 only if the project's tests pass afterwards."""
    with tempfile.TemporaryDirectory(prefix="crow-demo-") as folder, as_file(files("crow_cli.demo") / "project") as kit:
        shutil.copytree(kit, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        click.secho(f"crow demo in {folder}", bold=True, err=True)
        click.secho(f"{f'Model: {model}.' if model else SCRIPTED_NOTICE}\n\n> {TASK}\n", dim=True, err=True)
        if model:
            crow = await build(env, model=model, mode="accept-edits", without=[persistence, ask_user])
            code = await run(crow, TASK, folder, RunOptions(terminal=find_terminal(), is_stored=False))
        else:
            # The user's settings do not count here: the demo has to work before they do.
            with tempfile.TemporaryDirectory(prefix="crow-demo-home-") as home:
                async with ScriptedServer(next_reply) as server:
                    scripted = ChatModel(name="script", base_url=server.url, window=32_768)
                    own = {**env, "CROW_HOME": home}
                    crow = await build(own, mode="yolo", models={"script": scripted}, without=[persistence, ask_user])
                    code = await run(crow, TASK, folder, RunOptions(is_stored=False))
        works = await tests_pass(folder)
    if works and code == 0:
        click.secho("\nChecked once more, by this command: the tests pass.", fg="green", err=True)
        return 0
    click.secho("\nThe tests do not pass." if not works else "\nThe turn did not end well.", fg="red", err=True)
    return 1


async def tests_pass(folder: str) -> bool:
    """Run the project's tests, without the agent."""
    process = await asyncio.create_subprocess_exec(
        *TESTS_COMMAND, cwd=folder, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    return await process.wait() == 0
