"""`crow web` and `crow sessions show --web`, as processes."""

import asyncio
import sys
from asyncio.subprocess import PIPE
from typing import TYPE_CHECKING

import httpx2
import pytest

if TYPE_CHECKING:
    from conftest import Site

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.posix("the browser of the test is a POSIX command"),
    pytest.mark.parametrize("database", ["sqlite"], indirect=True),
]


@pytest.mark.parametrize("words", [("web",), ("sessions", "show", "--web")])
async def test_a_command_prints_the_address_of_a_session_and_opens_it(
    site: "Site", env: dict[str, str], words: tuple[str, ...]
):
    id = site.sessions[0]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "crow_cli", *words, id[:12], env=env | {"BROWSER": "echo opened %s"}, stdout=PIPE
    )
    assert process.stdout
    try:
        address = (await process.stdout.readline()).decode().strip()
        assert f"/session/{id}?token=" in address
        assert (await process.stdout.readline()).decode().strip() == f"opened {address}"
        async with httpx2.AsyncClient(follow_redirects=True) as client:
            assert (await client.get(address.partition("?")[0])).status_code == 401
            assert "Plan the garden" in (await client.get(address)).text
    finally:
        process.terminate()
        await process.wait()
