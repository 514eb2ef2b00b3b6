"""Only a browser that came with the token, to this address, from its own pages, is answered."""

from typing import TYPE_CHECKING

import httpx2
import pytest
from crow_persistence.database import Database
from crow_web.app import make_app
from crow_web.gate import Gate

if TYPE_CHECKING:
    from conftest import Site

pytestmark = pytest.mark.anyio
PORT = 4321


def visit(gate: Gate) -> httpx2.AsyncClient:
    """Return a browser without a cookie."""
    transport = httpx2.ASGITransport(app=gate)
    return httpx2.AsyncClient(transport=transport, base_url=f"http://127.0.0.1:{PORT}")


async def test_the_token_is_exchanged_once_for_a_cookie_that_scripts_cannot_read(database: Database):
    gate = Gate(make_app(database), PORT)
    async with visit(gate) as first, visit(gate) as second:
        for address in ("/", "/static/web.css", "/?token=", "/?token=wrong"):
            assert (await first.get(address)).status_code == 401
        address = f"/charts?token={gate.token}&x=1"
        answer = await first.get(address)
        assert (answer.status_code, answer.headers["location"]) == (303, "/charts?x=1")
        cookie = answer.headers["set-cookie"].lower()
        assert f"crow-web-{PORT}=" in cookie
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert (await first.get("/charts")).status_code == 200
        again = await second.get(address)
        assert again.status_code == 401
        assert "start `crow web` again" in again.text


async def test_other_hosts_origins_and_methods_are_refused(site: "Site"):
    client = site.client
    for host in ("evil.example", "evil.example:4321", "127.0.0.1", "127.0.0.1:80", "localhost.evil.example:4321"):
        assert (await client.get("/", headers={"host": host})).status_code == 421, host
    for origin in ("http://evil.example", "null", "http://127.0.0.1:80", "https://127.0.0.1:4321"):
        assert (await client.get("/", headers={"origin": origin})).status_code == 403, origin
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert (await client.request(method, "/")).status_code == 405, method


async def test_every_answer_forbids_what_the_pages_do_not_need(site: "Site"):
    for address in ("/", "/session/feed", "/static/web.js", "/static/missing"):
        headers = (await site.client.get(address)).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "require-trusted-types-for 'script'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "same-origin"
