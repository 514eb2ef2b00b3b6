"""Images in a conversation: what is not an image stops at the door, and one that an endpoint refuses is left out."""

import json
from base64 import b64encode
from typing import Any

import pytest
from crow_core.acp.connection import RpcError
from crow_core.acp.schema import (
    ClientCapabilities,
    ClientSessionCapabilities,
    ContentBlock,
    ImageBlock,
    NoticeCapabilities,
    NoticeUpdate,
    PromptRequest,
    ResourceBlock,
    ResourceContents,
    TextBlock,
)
from crow_core.app import Crow
from crow_core.content import find_image_type, to_part
from crow_core.messages.message import to_digest
from crow_core.messages.passes import view
from crow_core.messages.view import View
from crow_core.models.chat_model import ChatModel
from crow_core.models.refused_images import find_refused_images
from crow_core.testing import Editor, Failure, Raw, Reply, ScriptedServer, connect
from crow_extensions.refused_images import refused_images

pytestmark = pytest.mark.anyio

NOTICES = ClientCapabilities(session=ClientSessionCapabilities(notices=NoticeCapabilities()))
WEBP = b"RIFF\x00\x00\x00\x00WEBP"


def make_image(rest: bytes = b"", start: bytes = b"\x89PNG\r\n\x1a\n") -> str:
    return b64encode(start + rest).decode()


BAD, GOOD = make_image(b"bad" * 100), make_image(b"good")


def show(*images: str) -> list[ContentBlock]:
    return [TextBlock(text="look"), *(ImageBlock(data=data, mime_type="image/png") for data in images)]


def make_crow(server: ScriptedServer) -> Crow:
    return Crow(ChatModel(name="m", base_url=server.url)).use(refused_images)


async def prompt(editor: Editor, id: str, blocks: list[ContentBlock]) -> Any:
    return await editor.request("session/prompt", PromptRequest(session_id=id, prompt=blocks))


def refuse(error: Any, status: int = 400, *, in_stream: bool = False) -> Any:
    """Make a script that refuses every request with the bad image in this way."""

    def answer(request: dict[str, Any]) -> Reply | Failure | Raw:
        if BAD not in json.dumps(request):
            return Reply("Seen.")
        if in_stream:
            return Raw([f"data: {json.dumps({'error': error})}\n\n".encode()])
        return Failure(status, error if isinstance(error, str) else json.dumps({"error": error}))

    return answer


REFUSALS = [
    {"message": "Invalid base64 image_url."},
    {"message": "messages.3.content.1.image.source.base64: image exceeds 5 MB maximum: 6291456 bytes > 5242880 bytes"},
    {"message": "Unable to process input image. Please retry or report in the feedback.", "status": "INVALID_ARGUMENT"},
    {"message": "unsupported image"},
    {"message": "You uploaded an unsupported image. Please make sure your image is valid."},
    {"message": "Could not process image", "type": "invalid_request_error"},
    {"message": "The image data you provided does not represent a valid image.", "code": "invalid_base64"},
    {"message": "image_parse_error: cannot identify image file"},
    {"message": "Incorrect padding", "type": "BadRequestError"},
    {"message": "absolute aspect ratio must be smaller than 200, got 640.0"},
    {"message": "Request contains an invalid argument.", "status": "INVALID_ARGUMENT"},
    {"message": "messages[3].content[1]: unsupported MIME type"},
    "unsupported image",
]


@pytest.mark.parametrize("in_stream", [False, True])
@pytest.mark.parametrize("error", REFUSALS)
async def test_refused_image_is_left_out_and_later_prompts_work(error: Any, in_stream: bool):
    async with ScriptedServer(refuse(error, in_stream=in_stream)) as server:
        crow = make_crow(server)
        async with connect(crow, capabilities=NOTICES) as editor:
            id = (await editor.new_session("/")).session_id
            assert (await prompt(editor, id, show(GOOD))).stop_reason == "end_turn"
            assert (await prompt(editor, id, show(BAD))).stop_reason == "end_turn"
            assert (await prompt(editor, id, show())).stop_reason == "end_turn"
            (notice,) = editor.of(NoticeUpdate)
            (session,) = crow.sessions.values()
    assert notice.title.startswith("An image was refused, and the model is not sent it any more: ")
    assert error in notice.title if isinstance(error, str) else error["message"].rstrip(".") in notice.title
    last = json.dumps(server.requests[-1])
    assert GOOD in last
    assert BAD not in last
    assert "[an image that was left out: the endpoint refused it]" in last
    assert BAD in json.dumps(list(session.log))


@pytest.mark.parametrize(
    ("said", "left_out"),
    [
        ("messages[1].content[2].image_url: invalid base64 image", [1]),
        ("messages.1.content.1.image.source: image exceeds 5 MB maximum", [0]),
        ("image exceeds 5 MB maximum", [0]),
        ("Could not process image", [0, 1]),
        ("messages[9].content[2]: bad image", [0, 1]),
        ("the server is on fire", []),
    ],
)
def test_image_that_is_named_or_the_largest_is_the_refused_one(said: str, left_out: list[int]):
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}} for data in (BAD, GOOD)]
    earlier = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    new = {"role": "user", "content": [{"type": "text", "text": "look"}, *parts]}
    assert find_refused_images(said, [{"role": "system", "content": "s"}, new]) == [
        to_digest(parts[at]) for at in left_out
    ]
    log = [{"role": "user", "content": [earlier]}, {"role": "assistant", "content": "a"}, new]
    if "messages" not in said:
        assert find_refused_images(said, log) == [to_digest(parts[at]) for at in left_out]


@pytest.mark.parametrize(
    ("status", "said"), [(401, "Incorrect API key"), (402, "insufficient balance"), (404, "no such model")]
)
async def test_refusal_that_has_another_reason_leaves_no_image_out(status: int, said: str):
    async with ScriptedServer(refuse({"message": said}, status)) as server, connect(make_crow(server)) as editor:
        id = (await editor.new_session("/")).session_id
        with pytest.raises(RpcError, match=said):
            await prompt(editor, id, show(BAD))
    assert len(server.requests) == 1


async def test_refusal_of_every_image_ends(monkeypatch: pytest.MonkeyPatch):
    async with ScriptedServer(lambda request: Failure(400, '{"error": {"message": "bad image"}}')) as server:
        crow = make_crow(server)
        async with connect(crow) as editor:
            id = (await editor.new_session("/")).session_id
            with pytest.raises(RpcError, match="bad image"):
                await prompt(editor, id, show(BAD))
    assert len(server.requests) == 2


async def test_words_about_one_image_do_not_teach_that_the_model_sees_none():
    async with ScriptedServer(refuse("unsupported image")) as server:
        model = ChatModel(name="m", base_url=server.url)
        async with connect(Crow(model).use(refused_images)) as editor:
            id = (await editor.new_session("/")).session_id
            await prompt(editor, id, show(BAD))
            await prompt(editor, id, show(GOOD))
    assert model.quirks.images
    assert GOOD in json.dumps(server.requests[-1])


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        ("", "is empty"),
        ("A", "is not valid base64"),
        ("not base64 at all!", "is not valid base64"),
        (b64encode(b"<svg/>").decode(), "is not of a known kind"),
        (b64encode(b"plain text").decode(), "is not of a known kind"),
        (make_image(b"0" * 20_000_000), "is longer than 20 MB"),
    ],
    ids=range(6),
)
async def test_what_is_not_an_image_stops_at_the_door(data: str, fault: str):
    async with ScriptedServer([]) as server, connect(make_crow(server)) as editor:
        id = (await editor.new_session("/")).session_id
        embedded = ResourceBlock(resource=ResourceContents(uri="file:///b.png", blob=data, mime_type="image/png"))
        for block in (ImageBlock(data=data, mime_type="image/png"), embedded):
            if data or block is not embedded:
                with pytest.raises(RpcError) as refusal:
                    await prompt(editor, id, [TextBlock(text="look"), block])
                assert f"The image in prompt[1] {fault}" in str(refusal.value.data)
    assert server.requests == []
    assert "left out" in str(to_part({"type": "image", "data": data, "mimeType": "image/png"}))


@pytest.mark.parametrize(
    ("start", "kind"), [(b"\xff\xd8\xff\xe0", "image/jpeg"), (b"GIF89a", "image/gif"), (WEBP, "image/webp")]
)
async def test_model_is_sent_the_type_that_the_bytes_of_an_image_show(start: bytes, kind: str):
    data = make_image(b"rest", start)
    wrapped = f"{data[:4]}\n{data[4:]}"
    assert find_image_type(wrapped) == kind
    async with ScriptedServer([Reply("Seen.")]) as server, connect(make_crow(server)) as editor:
        id = (await editor.new_session("/")).session_id
        await prompt(editor, id, show(wrapped))
    assert f"data:{kind};base64,{data}" in json.dumps(server.requests)


def test_marker_leaves_images_out_before_it_and_a_rewind_brings_them_back():
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{BAD}"}}
    image = {"role": "user", "content": [part], "crow": {"id": "a"}}
    marker = {"crow": {"id": "b", "kind": "images", "refused": [to_digest(part)]}}
    answer = {"role": "assistant", "content": "a", "crow": {"id": "c"}}
    again = {"role": "user", "content": [part], "crow": {"id": "d"}}
    log: list[Any] = []
    growing = View(log)
    rewind = {"crow": {"id": "e", "kind": "rewind", "to": "a"}}
    for entry, is_shown in ((image, True), (marker, False), (answer, False), (again, False), (rewind, True)):
        log.append(entry)
        assert growing.messages() == view(log)
        assert (BAD in json.dumps(view(log)[:1])) is is_shown
    assert BAD in json.dumps(view(log[:4])[-1:])
