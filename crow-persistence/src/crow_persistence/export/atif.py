"""Export to the Agent Trajectory Interchange Format of Harbor (its RFC 0001, ATIF-v1.8)."""

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import crow_core
from crow_core.messages.message import Message, RawToolCall, parse_arguments, to_parts

from crow_persistence.export.transcript import Transcript, decode_media, describe_media, find_url

VERSION = "ATIF-v1.8"

Json = dict[str, Any]


def to_atif(transcript: Transcript) -> tuple[str, dict[str, bytes]]:
    """Return the trajectory as JSON, and its images by relative path, as the format requires."""
    record, summary, images = transcript.record, transcript.summary, dict[str, bytes]()
    steps = list(make_steps(transcript, images))
    turns = [model_call for model_call in transcript.model_calls if model_call["purpose"] == "turn"]
    trajectory = drop_none(
        schema_version=VERSION,
        session_id=summary.id,
        agent=drop_none(
            name="crow",
            version=transcript.model_calls[-1]["crow"] if transcript.model_calls else crow_core.__version__,
            model_name=turns[0]["model"] if turns else None,
            tool_definitions=record.tools or None,
            extra={"options": record.options} if record.options else None,
        ),
        steps=[{"step_id": number, **step} for number, step in enumerate(steps, 1)],
        notes=record.damage or None,
        final_metrics=sum_metrics(transcript, steps),
        extra={"title": summary.title, "cwd": summary.cwd, "roots": list(summary.roots)},
    )
    text = json.dumps(trajectory, indent=2, ensure_ascii=False)
    return text.encode("utf-8", "replace").decode() + "\n", images


def make_steps(transcript: Transcript, images: dict[str, bytes]) -> list[Json]:
    """Return a step for the system prompt, for each message of the user, and for each reply with its tool results."""
    model_calls = {model_call["id"]: model_call for model_call in transcript.model_calls}
    steps: list[Json] = []
    waiting: dict[str, Json] = {}
    """The step of each tool call that has no result yet, by tool call id."""
    if transcript.record.system is not None or not any("role" in entry for entry in transcript.record.log):
        steps.append({"source": "system", "message": transcript.record.system or ""})
    for entry in transcript.record.log:
        id = entry.get("crow", {}).get("id", "")
        match entry.get("role"):
            case "user":
                step = {"source": "user", "message": to_content(entry, images)}
                steps.append({**drop_none(timestamp=to_timestamp(transcript.times.get(id))), **step})
            case "assistant":
                model_call = model_calls.get(id, {})
                step = make_agent_step(entry, model_call, images)
                steps.append(
                    {**drop_none(timestamp=to_timestamp(transcript.times.get(id, model_call.get("started")))), **step}
                )
                waiting |= {tool_call["tool_call_id"]: steps[-1] for tool_call in step.get("tool_calls", [])}
            case "tool" if step := waiting.pop(id := entry.get("tool_call_id", ""), None):
                extra = {"failed": True} if entry.get("crow", {}).get("failed") else None
                result = drop_none(source_call_id=id, content=to_content(entry, images), extra=extra)
                step.setdefault("observation", {"results": []})["results"].append(result)
            case _:
                pass
    return steps


def make_agent_step(reply: Message, model_call: Mapping[str, Any], images: dict[str, bytes]) -> Json:
    """Return the step of a reply; `model_call` is empty if unknown."""
    notes = reply.get("crow", {})
    return drop_none(
        source="agent",
        model_name=model_call.get("model"),
        message=to_content(reply, images),
        reasoning_content=reply.get("reasoning_content"),
        tool_calls=[to_tool_call(tool_call) for tool_call in reply.get("tool_calls", [])] or None,
        metrics=to_metrics(model_call) if model_call else None,
        llm_call_count=1,
        extra={"interrupted": cut} if (cut := notes.get("cut")) else None,
    )


def to_tool_call(tool_call: RawToolCall) -> Json:
    arguments = parse_arguments(tool_call)
    raw = tool_call["function"]["arguments"]
    return {
        "tool_call_id": tool_call["id"],
        "function_name": tool_call["function"]["name"],
        "arguments": arguments if arguments is not None else {"invalid_json": raw} if raw else {},
    }


def to_metrics(model_call: Mapping[str, Any]) -> Json:
    """Return the token counts and cost of a model call; `extra` holds times in milliseconds and the provider's
    usage."""
    dollars = model_call["currency"] == "USD"
    extra = drop_none(
        first_ms=model_call["first"] and round(model_call["first"], 1),
        total_ms=model_call["total"] and round(model_call["total"], 1),
        stop_reason=model_call["stop_reason"],
        error=model_call["error"],
        usage=model_call["usage"] or None,
        cost=None if dollars else model_call["cost"],
        currency=None if dollars else model_call["currency"],
    )
    return drop_none(
        prompt_tokens=model_call["input"],
        completion_tokens=model_call["output"],
        cached_tokens=model_call["cached"],
        cost_usd=model_call["cost"] if dollars else None,
        extra=extra or None,
    )


def sum_metrics(transcript: Transcript, steps: list[Json]) -> Json:
    """Return the totals over all steps; the cost is that of all model calls of the session."""
    metrics = [step["metrics"] for step in steps if "metrics" in step]
    costs = [model_call["cost"] for model_call in transcript.model_calls if model_call["currency"] == "USD"]
    return drop_none(
        total_prompt_tokens=sum(one.get("prompt_tokens", 0) for one in metrics) if metrics else None,
        total_completion_tokens=sum(one.get("completion_tokens", 0) for one in metrics) if metrics else None,
        total_cached_tokens=sum(one.get("cached_tokens", 0) for one in metrics) if metrics else None,
        total_cost_usd=round(sum(costs), 10) if costs else None,
        total_steps=len(steps),
    )


def to_content(message: Message, images: dict[str, bytes]) -> str | list[Json]:
    """Return a message's content: text, or parts if it has images. Images are added to `images`."""
    parts: list[Json] = []
    for part in to_parts(message.get("content")):
        url = find_url(part)
        if (found := decode_media(url)) and found[0].startswith("image/"):
            path = f"images/{hashlib.sha256(found[1]).hexdigest()[:16]}.{found[0].removeprefix('image/')}"
            images[path] = found[1]
            parts.append({"type": "image", "source": {"media_type": found[0], "path": path}})
        else:
            parts.append({"type": "text", "text": f"[{describe_media(url)}]" if url else str(part.get("text", ""))})
    if all(part["type"] == "text" for part in parts):
        return "\n\n".join(part["text"] for part in parts)
    return parts


def to_timestamp(at: int | None) -> str | None:
    """Format milliseconds since 1970 in ISO 8601."""
    if at is None:
        return None
    return datetime.fromtimestamp(at / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def drop_none(**values: Any) -> Json:
    """Return the values that are not None: the format has no nulls."""
    return {name: value for name, value in values.items() if value is not None}
