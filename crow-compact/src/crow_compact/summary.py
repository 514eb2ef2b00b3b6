"""Ask the model for a summary of a conversation.

The first request has the conversation's messages and tools before the question, so that the server can use its cache.
If that does not fit, or its answer is unusable, the next has the conversation as a text, and no tools.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from crow_core.errors import ModelError, PromptError
from crow_core.messages.message import Message, get_id, to_parts
from crow_core.messages.passes import SHAPING_PASSES, apply_passes, view
from crow_core.models.chat_model import ChatModel
from crow_core.models.model_call import Model, ModelCall, ModelRequest
from crow_core.models.printed import begins_with_mark
from crow_core.models.token_usage import to_count
from crow_core.session.session import Session
from crow_system.shortening import shorten_middle

from crow_compact.markers import find_earlier_summary, make_compaction_marker, make_shrink_marker
from crow_compact.tokens import TokenEstimator

MESSAGES_SHARE = 0.95
"""The share of the window that the messages and the question may take; the rest is for the summary."""
TEXT_SHARE = 0.75
"""The share of the window that the conversation as a text and the question may take."""
SUMMARY_SHARE = 0.25
"""The share of the limit that a summary may take."""
WORDS_PER_TOKEN = 0.6
MIN_WORDS = 60
"""Words that the model is allowed at least. A shorter text with a tool call announces the call, and does not count as a
summary."""
MAX_REFUSALS = 6
"""Requests for a summary that are tried when they are refused as too long."""
RETRY_SHARE = 0.6
"""The share of a refused request's size that the next attempt may have."""
MAX_FAILURES = 3
"""Unusable summaries in a row, after which the oldest messages are left out without one."""

TEXT_SYSTEM = "You sum up a conversation between a user and you, an assistant that works with tools."
"""The system prompt of a request with the conversation as a text."""
NOT_SHORTER = "The summary would not be shorter than the conversation."
CALLED = "The model called a tool instead of summing up."
HEADINGS = {"user": "User", "assistant": "Assistant", "tool": "Result of a tool", "system": "System"}
GAP = "\n[…]\n"
"""Stands for the middle of a text that was too long."""


class CannotCompact(Exception):
    """A conversation cannot be made shorter. The text is a sentence for the user."""


class NoSummary(CannotCompact):
    """No usable summary was made; `may_repeat` tells whether asking again may bring one."""

    def __init__(self, sentence: str, *, may_repeat: bool = True) -> None:
        super().__init__(sentence)
        self.may_repeat = may_repeat


@dataclass
class Summarizer:
    """Asks for a summary of the entries before the last of `cuts`."""

    session: Session
    request: ModelRequest
    """The session's next request."""
    entries: Sequence[Message]
    """The entries of the log, after its selecting markers were applied."""
    cuts: Sequence[int]
    """The indexes of the entries that a part of the conversation may end before."""
    estimator: TokenEstimator
    window: int
    """Tokens that fit into a request and its reply; less after a request was refused as too long."""
    limit: int
    """Tokens that the session's requests should have at most."""
    instructions: str
    """The user's wishes for the summary."""

    async def summarize(self) -> str:
        """Return the summary. Raises NoSummary."""
        for _ in range(MAX_REFUSALS):
            try:
                found = None if self.estimator.failures else self.find_prefix()
                return await (self.summarize_text() if found is None else self.summarize_messages(*found))
            except ModelError as error:
                if not error.too_long:
                    raise NoSummary(str(error), may_repeat=False) from error
                self.window = int(min(self.window, self.estimator.estimate(self.request)) * RETRY_SHARE)
        self.estimator.failures = MAX_FAILURES  # no later attempt would be shorter
        raise NoSummary("Even a part of the conversation is too long for the model to sum up.", may_repeat=False)

    def find_prefix(self) -> tuple[list[Message], int] | None:
        """Return the messages to ask behind, and how many of the last stay unchanged; None if they do not fit.

        They are those of the session's next request, so that the server has them in its cache. If these end with a
        message of the user, which the model might answer in place of the question, they are those before the last cut.
        """
        messages: list[Message] = self.request["messages"]
        kept = sum("role" in entry for entry in self.entries[self.cuts[-1] :])
        if messages[-1].get("role") == "user":
            messages, kept = [messages[0], *apply_passes(SHAPING_PASSES, self.entries[: self.cuts[-1]])], 0
        fits = self.measure({**self.request, "messages": messages}) <= MESSAGES_SHARE * self.window
        return (messages, kept) if fits and messages[-1].get("role") in ("assistant", "tool") else None

    async def summarize_messages(self, messages: Sequence[Message], kept: int) -> str:
        """Return the model's summary of messages; the last `kept` stay unchanged.

        Raises NoSummary and ModelError.
        """
        request = {**self.request, "messages": messages}
        question = self.render_question(request, kept)
        request["messages"] = [*messages, {"role": "user", "content": question}]
        model_call = await self.session.ask_model(request, "compaction")
        summary = self.read_summary(model_call)
        if model_call.reply.get("tool_calls") and len(summary.split()) < MIN_WORDS:
            raise NoSummary(CALLED)
        return summary

    async def summarize_text(self) -> str:
        """Return the model's summary of the text, made in parts if necessary: each from the summary of those before.

        Begin with the last compaction's summary, if there is one. Raises NoSummary and ModelError.
        """
        seen = self.session.view
        entries, (summary, start) = seen.entries(), find_earlier_summary(seen)
        behind_first = next((at for at, entry in enumerate(entries) if entry.get("role") == "user"), 0) + 1
        cuts = [at for at in self.cuts if get_id(self.entries[at]) != start]
        room = TEXT_SHARE * self.window
        while cuts:

            def list_sections(cut: int, start: str = start, summary: str = summary) -> list[str]:
                """List the texts of the summary so far and of the messages between it and a cut."""
                end = seen.find(get_id(self.entries[cut]))
                earlier = [make_compaction_marker(summary, start, [])] if start else []
                read = entries[max(seen.find(start), behind_first) if start else behind_first : end]
                return to_sections(view([*entries[:behind_first], *read, make_shrink_marker("", []), *earlier]))

            fitting = bisect_right(cuts, room, key=lambda cut: self.measure(self.make_text_request(list_sections(cut))))
            used = max(fitting, 1)
            sections = list_sections(cuts[used - 1])
            if not fitting:  # a message is too long
                free = (room - self.measure(self.make_text_request([]))) / self.estimator.get_rate()
                sections = [shorten_middle(section, int(free / len(sections)), GAP) for section in sections]
            request = self.make_text_request(sections)
            question = self.render_question(request, 0)
            request["messages"][-1]["content"] += f"\n\n{question}"
            summary = self.read_summary(await self.session.ask_model(request, "compaction"))
            if len(summary) >= sum(map(len, sections)):
                raise NoSummary(NOT_SHORTER)
            start, cuts = get_id(self.entries[cuts[used - 1]]), cuts[used:]
        return summary

    def make_text_request(self, sections: Sequence[str]) -> ModelRequest:
        """Return a request without tools, with the text of a conversation as its message."""
        own = {key: value for key, value in self.request.items() if "tool" not in key and key != "messages"}
        text = "\n\n".join(["<conversation>", *sections, "</conversation>"])
        return {**own, "messages": [{"role": "system", "content": TEXT_SYSTEM}, {"role": "user", "content": text}]}

    def measure(self, request: ModelRequest) -> int:
        """Return the estimated tokens of a request together with the question that it will be asked."""
        question = self.session.prompts.templates["compaction"].template + self.instructions
        return self.estimator.estimate(request) + self.estimator.estimate(
            {"messages": [{"role": "user", "content": question}]}
        )

    def render_question(self, request: ModelRequest, kept: int) -> str:
        """Render the question for a summary that fits behind a request. Raises NoSummary."""
        tokens = [SUMMARY_SHARE * self.limit, self.window - self.measure(request)]
        tokens += [limit for limit in (get_max_tokens(self.session.model, request),) if limit]
        words = max(MIN_WORDS, int(WORDS_PER_TOKEN * min(tokens)))
        prompt = self.session.prompts.templates["compaction"]
        try:
            return self.session.prompts.render(
                prompt, "compaction", kept=kept, instructions=self.instructions, words=words
            )
        except PromptError as error:
            raise NoSummary(str(error), may_repeat=False) from error

    def read_summary(self, model_call: ModelCall) -> str:
        """Return the text of the model's answer, whatever tools it calls. Raises NoSummary."""
        summary = str(model_call.reply.get("content") or "").strip()
        match model_call.finish_reason:
            case "content_filter":
                raise NoSummary("The model refused to sum up.")
            case "length":
                self.estimator.cut_short = summary or self.estimator.cut_short
                raise NoSummary("The model's summary was cut short; a larger max_tokens or window may help.")
            case "repetition":
                raise NoSummary("The model's summary repeated itself.")
            case _ if begins_with_mark(summary) or (model_call.reply.get("tool_calls") and not summary):
                raise NoSummary(CALLED)
            case _ if not summary:
                raise NoSummary("The model's summary was empty.")
            case _:
                return summary


def get_max_tokens(model: Model, request: ModelRequest) -> int:
    """Return the tokens that a model's reply may have by its parameters; 0 if they do not say."""
    parameters = {**(model.parameters if isinstance(model, ChatModel) else {}), **request}
    counts = (to_count(parameters.get(key)) for key in ("max_tokens", "max_completion_tokens", "n_predict"))
    return min(filter(None, counts), default=0)


def to_sections(messages: Sequence[Message]) -> list[str]:
    """Convert messages to texts, each below a line that tells who said it."""
    sections: list[str] = []
    for message in messages:
        if text := "\n\n".join(part.get("text") or "[image]" for part in to_parts(message.get("content"))):
            sections.append(f"[{HEADINGS[message.get('role', 'user')]}]\n{text}")
        for use in message.get("tool_calls", ()):
            sections.append(f"[Assistant calls {use['function']['name']}]\n{use['function']['arguments']}")
    return sections
