"""Chat templates that fit a model's calls: what `crow doctor` writes, and the line that it prints."""

import asyncio
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from crow_cli.chat_templates import find_marks, fit_template
from crow_core.testing import Reply, ScriptedServer
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine

QWEN = Path(__file__).parent / "files" / "qwen2.5-coder.jinja"
"""The template of Qwen2.5-Coder-1.5B-Instruct, from the file that `just lab` serves."""
CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'


def render(template: str) -> str:
    """Render a template with a tool, a call and its result."""
    function = {"name": "weather", "arguments": {"city": "Paris"}}
    messages = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "Sunny."},
    ]
    environment = ImmutableSandboxedEnvironment()
    return environment.from_string(template).render(messages=messages, tools=[{}], add_generation_prompt=True)


def test_fitted_template_asks_for_the_marks_that_the_model_writes():
    marks = find_marks(f"```json\n{CALL}\n```")
    assert marks == ("```json", "```")
    fitted = fit_template(QWEN.read_text("utf-8"), marks)
    assert fitted
    text = render(fitted)
    assert "tool_call>" not in text
    assert f"```json\n{CALL}\n```" in text
    assert '```json\n{"name": <function-name>, "arguments": <args-json-object>}\n```' in text
    assert text.endswith("<tool_response>\nSunny.\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(("printed", "marks"), [(f"<tools>\n{CALL}\n</tools>", ("<tools>", "</tools>")), (CALL, None)])
def test_marks_are_those_of_the_printed_call(printed: str, marks: Any):
    assert find_marks(printed) == marks


def test_template_without_the_usual_marks_is_left_alone():
    assert fit_template("{{ messages }}", ("```json", "```")) is None


def script(request: dict[str, Any]) -> Reply:
    """Answer like Qwen2.5-Coder: calls are in a fence."""
    return Reply(f"```json\n{CALL}\n```" if "weather" in str(request.get("tools")) else "Hello.")


SERVERS: dict[str, tuple[dict[str, Any], str]] = {
    "llama.cpp": (
        {
            "/props": {
                "chat_template": QWEN.read_text("utf-8"),
                "model_path": "/models/my model.gguf",
                "default_generation_settings": {"n_ctx": 16384},
            }
        },
        "llama-server",
    ),
    "Ollama": ({"/api/show": {"template": "<|im_start|>system"}}, "ollama"),
}


@pytest.mark.anyio
@pytest.mark.parametrize("name", SERVERS)
async def test_doctor_writes_the_fitting_file_and_the_line_that_uses_it(name: str, machine: "Machine"):
    pages, program = SERVERS[name]
    async with ScriptedServer(script, pages=pages) as server:
        machine.configure(f'[models.local]\nbase_url = "{server.url}"\nmodel = "small:1.5b"\n')
        done = await machine.crow("doctor", "--model", "local")
    (line,) = re.findall(rf"^ +({program} .*)$", done.out, re.M)
    words = shlex.split(line)
    text = await asyncio.to_thread(Path(words[-1]).read_text, "utf-8")
    assert "```json" in text
    if name == "Ollama":
        assert words[:3] == ["ollama", "create", "small-1.5b-tools"]
        assert text.startswith("FROM small:1.5b\n")
    else:
        assert words[:4] == ["llama-server", "-m", "/models/my model.gguf", "--jinja"]
        assert CALL in render(text)


@pytest.mark.anyio
async def test_doctor_finds_a_model_that_calls_tools_only_under_a_schema(machine: "Machine"):
    def answer(request: dict[str, Any]) -> Reply:
        if "use_tool" in str(request.get("response_format")):
            return Reply(f'{{"use_tool": true, {CALL[1:]}')
        return Reply("I cannot look up the weather.")

    async with ScriptedServer(answer) as server:
        machine.configure(f'[models.local]\nbase_url = "{server.url}"\nmodel = "m"\n')
        done = await machine.crow("doctor", "--model", "local")
    assert "Under a JSON schema, tools are called." in done.out
    assert 'call_form = "schema"' in done.out
    assert "template" not in done.out
