"""The example of many prompts runs against an endpoint, and stays short."""

import asyncio
import os
import re
import sys
from pathlib import Path
from typing import Any

from crow_core.testing import Reply, ScriptedServer

README = Path(__file__).parents[1] / "README.md"


def test_twenty_prompts_with_typed_results_take_eighteen_lines(home: Path) -> None:
    (program,) = re.findall(r"^## Many prompts\n.*?^```py\n(.*?)^```", README.read_text("utf-8"), re.M | re.S)
    assert len([line for line in program.splitlines() if line.strip()]) <= 18

    def answer(request: dict[str, Any]) -> Reply:
        (number,) = re.findall(r"number (\d+) by", str(request["messages"][1]["content"]))
        return Reply(tool_calls=[{"name": "give_result", "arguments": {"name": f"C{number}", "people": 1000}}])

    async def main() -> str:
        async with ScriptedServer(answer) as server:
            env = {
                "PATH": os.environ["PATH"],
                "HOME": str(home),
                "CROW_HOME": str(home / "crow"),
                "OPENAI_API_KEY": "k",
            }
            env |= {"OPENAI_BASE_URL": server.url, "CROW_MODEL": "scripted"}
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", program), env=env, cwd=home, stdout=-1, stderr=-1
            )
            out, errors = await process.communicate()
            assert (process.returncode, errors.decode()) == (0, "")
            assert len(server.requests) == 20
            return out.decode()

    assert asyncio.run(main()).splitlines() == [f"C{n}: 1,000" for n in range(1, 21)]
