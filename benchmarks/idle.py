"""What a further idle session costs: memory of a `crow acp` that stores what it says, with all it has by default.

Run with `uv run python benchmarks/idle.py`. Sessions are opened until there are as many as asked for; then each has one
turn, and is idle again. Before that, one session has had a turn, so that all is loaded.

Measured: 113 MiB with one session, 12 KiB for a further one, 36 KiB once something was said in it; the same for 200 and
for 400 sessions.
"""

import argparse
import asyncio
import re
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import serve
from cancel import agent


def resident(pid: int) -> int:
    """KiB of memory that a process holds."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) if found else 0


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=200)
    args = parser.parse_args()
    model = await asyncio.create_subprocess_exec(sys.executable, serve.__file__, "--model", stdout=PIPE)
    assert model.stdout
    url = f"http://127.0.0.1:{(await model.stdout.readline()).decode().strip()}/v1"
    try:
        async with agent(url) as (client, pid, home):
            await client.hear(100, home)
            before = resident(pid)
            sessions = [await client.open(home) for _ in range(args.sessions)]
            opened = resident(pid)
            for session in sessions:
                await client.say(session, "Say 10 words.")
            said = resident(pid)
    finally:
        model.kill()
        await model.wait()
    print(f"{before / 1024:.0f} MiB with one session; a further one {(opened - before) / args.sessions:.0f} KiB,")
    print(f"{(said - before) / args.sessions:.0f} KiB once something was said in it")


if __name__ == "__main__":
    asyncio.run(main())
