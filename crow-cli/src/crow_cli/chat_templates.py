"""Chat templates that fit the tool calls of a model: a server parses the form that its template asks for.

Many small models write their calls in a fence or bare, whatever the template asks for. Then the server sends them as
text. A template that asks for the model's own form makes the server parse it.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crow_core.errors import ConfigError
from crow_core.models.chat_model import ChatModel
from crow_core.models.endpoint import create_http_client, is_on_private_network, join_url
from crow_core.models.window import ANSWER_TIMEOUT, get_object, post_object

Marks = tuple[str, str]

FORMS: dict[str, Marks] = {
    r"\s*```": ("```json", "```"),
    r"\s*<tools>": ("<tools>", "</tools>"),
}
"""The marks around a call, by the beginning of a reply."""
STANDARD: Marks = ("<tool_call>", "</tool_call>")
"""The marks in the templates of Qwen and of other models that follow Hermes."""

MODELFILE = '''\
FROM {name}
TEMPLATE """{{{{- if or .System .Tools }}}}<|im_start|>system
{{{{ .System }}}}
{{{{- if .Tools }}}}

# Tools

You may call one or more functions. Their signatures:
{{{{- range .Tools }}}}
{{{{ .Function }}}}
{{{{- end }}}}

For each function call, write a JSON object with the name and the arguments of the function:
{open}
{{"name": <function-name>, "arguments": <arguments>}}
{close}
{{{{- end }}}}<|im_end|>
{{{{ end }}}}
{{{{- range $i, $message := .Messages }}}}
{{{{- $last := eq (len (slice $.Messages $i)) 1 }}}}
{{{{- if eq .Role "user" }}}}<|im_start|>user
{{{{ .Content }}}}<|im_end|>
{{{{ else if eq .Role "assistant" }}}}<|im_start|>assistant
{{{{ .Content }}}}
{{{{- range .ToolCalls }}}}
{open}
{{"name": "{{{{ .Function.Name }}}}", "arguments": {{{{ .Function.Arguments }}}}}}
{close}
{{{{- end }}}}{{{{ if not $last }}}}<|im_end|>
{{{{ end }}}}
{{{{- else if eq .Role "tool" }}}}<|im_start|>user
<tool_response>
{{{{ .Content }}}}
</tool_response><|im_end|>
{{{{ end }}}}
{{{{- if and (ne .Role "assistant") $last }}}}<|im_start|>assistant
{{{{ end }}}}
{{{{- end }}}}"""
'''
"""The file from which Ollama makes a model with the marks of its calls; for models with the marks of ChatML."""


def find_marks(printed: str) -> Marks | None:
    """Return the marks that a model writes around its calls; None for a form that no template asks for."""
    return next((marks for begin, marks in FORMS.items() if re.match(begin, printed)), None)


def fit_template(template: str, marks: Marks) -> str | None:
    """Return a chat template that asks for these marks; None if it has none to replace."""
    if STANDARD[0] not in template or STANDARD[1] not in template:
        return None
    asked = f"within {''.join(STANDARD)} XML tags"
    fitted = template.replace(asked, f"between {marks[0]} and {marks[1]}")
    fitted = fitted.replace(STANDARD[0], marks[0]).replace(STANDARD[1], marks[1])
    # Qwen2.5's template shows two braces, which its models copy.
    return fitted.replace('{{\\"name\\"', '{\\"name\\"').replace("<args-json-object>}}", "<args-json-object>}")


async def write_fitting_template(model: ChatModel, printed: str, folder: Path) -> str:
    """Write the template, or the file for Ollama, that fits a model whose server sent this call as text.

    Return what to do with it, as text for the user; "" if none fits, or the server has none to fit. Raises ConfigError.
    """
    import httpx2  # see crow_core.models.endpoint

    marks = find_marks(printed)
    if marks is None or not is_on_private_network(model.base_url):
        return ""
    root = join_url(model.base_url, "").partition("?")[0].rstrip("/").removesuffix("/v1")
    name = re.sub(r"[^\w.-]+", "-", model.name)
    try:
        async with create_http_client(model.base_url, model.api_key, ANSWER_TIMEOUT, model.headers) as http:
            props = await get_object(http, f"{root}/props")
            if fitted := fit_template(str(props.get("chat_template") or ""), marks):
                path = write_file(folder / f"{name}.jinja", fitted)
                return to_llama_cpp_advice(path, props)
            details = await post_object(http, f"{root}/api/show", {"model": model.name})
    except (httpx2.HTTPError, httpx2.InvalidURL, UnicodeEncodeError):
        return ""
    if "<|im_start|>" not in str(details.get("template") or ""):
        return ""
    text = MODELFILE.format(name=model.name, open=marks[0], close=marks[1])
    path = write_file(folder / f"{name}.Modelfile", text)
    return f"{WRITTEN.format(path)}  ollama create {name}-tools -f '{path}'\nThen choose the model {name}-tools."


WRITTEN = "\nThe template of the server does not fit this model's tool calls. One that does is in\n{}\nUse it:\n\n"


def to_llama_cpp_advice(path: Path, props: Mapping[str, Any]) -> str:
    """Return the line that starts llama.cpp with a template."""
    file = str(props.get("model_path") or "MODEL.gguf")
    return f"{WRITTEN.format(path)}  llama-server -m '{file}' --jinja --chat-template-file '{path}'"


def write_file(path: Path, text: str) -> Path:
    """Write a file, and its folder. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}.") from error
    return path
