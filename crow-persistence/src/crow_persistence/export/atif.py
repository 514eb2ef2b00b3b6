"""A session as a trajectory in the Agent Trajectory Interchange Format of Harbor (its RFC 0001, ATIF-v1.8)."""

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import crow_core
from crow_core.messages import Message, ToolUse, parse_arguments, to_parts

from crow_persistence.export.transcript import Story, address_of, caption, embedded

VERSION = "ATIF-v1.8"

Json = dict[str, Any]


def atif(story: Story) -> tuple[str, dict[str, bytes]]:
    """The trajectory as JSON, and the images it refers to by paths relative to it, as the format wants them."""
    record, summary, images = story.record, story.summary, dict[str, bytes]()
    steps = list(steps_of(story, images))
    turns = [call for call in story.calls if call["purpose"] == "turn"]
    trajectory = given(
        schema_version=VERSION,
        session_id=summary.id,
        agent=given(
            name="crow",
            version=story.calls[-1]["crow"] if story.calls else crow_core.__version__,
            model_name=turns[0]["model"] if turns else None,
            tool_definitions=record.tools or None,
            extra={"options": record.options} if record.options else None,
        ),
        steps=[{"step_id": number, **step} for number, step in enumerate(steps, 1)],
        notes=record.damage or None,
        final_metrics=totals(story, steps),
        extra={"title": summary.title, "cwd": summary.cwd, "roots": list(summary.roots)},
    )
    text = json.dumps(trajectory, indent=2, ensure_ascii=False)
    return text.encode("utf-8", "replace").decode() + "\n", images


def steps_of(story: Story, images: dict[str, bytes]) -> list[Json]:
    """A step for the system prompt, for every message of the user, and for every reply with what its tools answered."""
    calls = {call["id"]: call for call in story.calls}
    steps: list[Json] = []
    waiting: dict[str, Json] = {}
    """The step of each tool call that has no answer yet, by the call's id."""
    if story.record.system is not None or not any("role" in entry for entry in story.record.log):
        steps.append({"source": "system", "message": story.record.system or ""})
    for entry in story.record.log:
        id = entry.get("crow", {}).get("id", "")
        match entry.get("role"):
            case "user":
                step = {"source": "user", "message": said(entry, images)}
                steps.append({**given(timestamp=stamp(story.times.get(id))), **step})
            case "assistant":
                call = calls.get(id, {})
                step = agent_step(entry, call, images)
                steps.append({**given(timestamp=stamp(story.times.get(id, call.get("started")))), **step})
                waiting |= {use["tool_call_id"]: steps[-1] for use in step.get("tool_calls", [])}
            case "tool" if step := waiting.pop(id := entry.get("tool_call_id", ""), None):
                extra = {"failed": True} if entry.get("crow", {}).get("failed") else None
                result = given(source_call_id=id, content=said(entry, images), extra=extra)
                step.setdefault("observation", {"results": []})["results"].append(result)
            case _:
                pass
    return steps


def agent_step(reply: Message, call: Mapping[str, Any], images: dict[str, bytes]) -> Json:
    """A reply of the model; `call` is empty where its call is not known."""
    notes = reply.get("crow", {})
    return given(
        source="agent",
        model_name=call.get("model"),
        message=said(reply, images),
        reasoning_content=reply.get("reasoning_content"),
        tool_calls=[tool_call(use) for use in reply.get("tool_calls", [])] or None,
        metrics=metrics(call) if call else None,
        llm_call_count=1,
        extra={"interrupted": notes["cut"]} if notes.get("cut") else None,
    )


def tool_call(use: ToolUse) -> Json:
    arguments = parse_arguments(use)
    raw = use["function"]["arguments"]
    return {
        "tool_call_id": use["id"],
        "function_name": use["function"]["name"],
        "arguments": arguments if arguments is not None else {"invalid_json": raw} if raw else {},
    }


def metrics(call: Mapping[str, Any]) -> Json:
    """What a call used; `extra` has milliseconds, and what the provider counted in its own words."""
    dollars = call["currency"] == "USD"
    extra = given(
        first_ms=call["first"] and round(call["first"], 1),
        total_ms=call["total"] and round(call["total"], 1),
        stop_reason=call["stop_reason"],
        error=call["error"],
        usage=call["usage"] or None,
        cost=None if dollars else call["cost"],
        currency=None if dollars else call["currency"],
    )
    return given(
        prompt_tokens=call["input"],
        completion_tokens=call["output"],
        cached_tokens=call["cached"],
        cost_usd=call["cost"] if dollars else None,
        extra=extra or None,
    )


def totals(story: Story, steps: list[Json]) -> Json:
    """The sums over all steps; of the cost, over all calls of the session."""
    told = [step["metrics"] for step in steps if "metrics" in step]
    costs = [call["cost"] for call in story.calls if call["currency"] == "USD"]
    return given(
        total_prompt_tokens=sum(one.get("prompt_tokens", 0) for one in told) if told else None,
        total_completion_tokens=sum(one.get("completion_tokens", 0) for one in told) if told else None,
        total_cached_tokens=sum(one.get("cached_tokens", 0) for one in told) if told else None,
        total_cost_usd=round(sum(costs), 10) if costs else None,
        total_steps=len(steps),
    )


def said(message: Message, images: dict[str, bytes]) -> str | list[Json]:
    """The content of a message: text, or parts when images are in it; those go to `images`."""
    told: list[Json] = []
    for part in to_parts(message.get("content")):
        url = address_of(part)
        if (found := embedded(url)) and found[0].startswith("image/"):
            path = f"images/{hashlib.sha256(found[1]).hexdigest()[:16]}.{found[0].removeprefix('image/')}"
            images[path] = found[1]
            told.append({"type": "image", "source": {"media_type": found[0], "path": path}})
        else:
            told.append({"type": "text", "text": f"[{caption(url)}]" if url else str(part.get("text", ""))})
    if all(part["type"] == "text" for part in told):
        return "\n\n".join(part["text"] for part in told)
    return told


def stamp(at: int | None) -> str | None:
    """A time in ISO 8601."""
    if at is None:
        return None
    return datetime.fromtimestamp(at / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def given(**values: Any) -> Json:
    """An object of what there is: the format has no nulls."""
    return {name: value for name, value in values.items() if value is not None}
