"""The files of the workspace as resources."""

import pytest
from crow_mcp_server import create_server
from fastmcp import Client
from mcp.shared.exceptions import MCPError

pytestmark = pytest.mark.anyio


@pytest.fixture
async def client(folder, monkeypatch):
    monkeypatch.chdir(folder)
    async with Client(create_server()) as client:
        yield client


async def test_text_file_is_read_unchanged_through_the_template(client, folder):
    [template] = await client.list_resource_templates()
    assert template.uri_template == "file:///{path*}"
    path = folder / "two words é.py"
    path.write_text("print(6 * 7)\n")
    [read] = await client.read_resource(path.as_uri())
    assert (read.text, read.mime_type) == ("print(6 * 7)\n", "text/x-python")


async def test_binary_file_is_returned_as_bytes(client, folder):
    (folder / "a.png").write_bytes(b"\x89PNG\0")
    [read] = await client.read_resource((folder / "a.png").as_uri())
    assert (read.blob, read.mime_type) == ("iVBORwA=", "image/png")


async def test_folder_lists_the_uris_of_its_entries(client, folder):
    (folder / "sub").mkdir()
    (folder / "a b").touch()
    [read] = await client.read_resource(folder.as_uri())
    assert read.text.splitlines() == [f"{folder.as_uri()}/a%20b", f"{folder.as_uri()}/sub"]


@pytest.mark.parametrize("path", ["gone", "../secret", "%2e%2e/secret", "link"])
async def test_no_file_outside_of_the_roots_is_read(client, folder, path):
    (folder.parent / "secret").write_text("secret")
    (folder / "link").symlink_to(folder.parent / "secret")
    with pytest.raises(MCPError) as error:
        await client.read_resource(f"{folder.as_uri()}/{path}")
    assert "secret" not in str(error.value) or "outside of the folders" in str(error.value)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_the_clients_roots_bound_resources_too(folder, tmp_path, mode):
    (folder / "a").write_text("one\n")
    (tmp_path / "b").write_text("two\n")
    async with Client(create_server(), mode=mode, roots=[folder.as_uri()]) as client:
        [read] = await client.read_resource((folder / "a").as_uri())
        assert read.text == "one\n"
        with pytest.raises(MCPError, match="outside of the folders"):
            await client.read_resource((tmp_path / "b").as_uri())
