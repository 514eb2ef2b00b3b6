"""The words of the user that the agent does not have yet."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from crow_terminal.blocks import CommandOutput
from crow_terminal.effects import Edit, Effect, Steer, Withdraw


@dataclass
class PromptQueue:
    """The prompts for later turns, the words for the running one, and the commands to tell the agent of."""

    prompts: list[str] = field(default_factory=list[str])
    """Prompts to send when the turn ends."""
    steers: list[Steer] = field(default_factory=list[Steer])
    """Words for the running turn that the agent has neither taken nor refused."""
    refused: list[str] = field(default_factory=list[str])
    """Words that the turn did not take, until all of `steers` are answered."""
    returning: bool = False
    """True if words that the turn did not take go back to the editor, rather than into the queue."""
    outputs: list[CommandOutput] = field(default_factory=list[CommandOutput])
    """The user's commands that the next prompt tells the agent of."""

    def __bool__(self) -> bool:
        """True if words wait."""
        return bool(self.prompts or self.steers)

    def __iter__(self) -> Iterator[str]:
        """Yield the words in the order in which the agent gets them."""
        yield from (steer.text for steer in self.steers)
        yield from self.refused
        yield from self.prompts

    def take_outputs(self) -> tuple[CommandOutput, ...]:
        """Remove the outputs of the user's commands, to send them."""
        outputs, self.outputs = tuple(self.outputs), []
        return outputs

    def steer(self, text: str) -> Steer:
        """Add words for the running turn."""
        self.steers.append(steer := Steer(text, self.take_outputs()))
        return steer

    def end_steer(self, steer: Steer, *, taken: bool) -> list[Effect]:
        """Remove words that the agent has answered; after the last answer, keep the refused ones elsewhere."""
        self.steers = [one for one in self.steers if one is not steer]
        if not taken:
            self.refused.append(steer.text)
            self.outputs[:0] = steer.outputs
        if self.steers:
            return []
        refused, returns = self.refused, self.returning
        self.refused, self.returning = [], False
        if refused and returns:
            return [Edit("\n".join(refused), keep=True)]
        self.prompts[:0] = refused
        return []

    def leave_steers(self) -> None:
        """Move the words that will get no answer to the prompts."""
        self.prompts[:0] = [*self.refused, *(steer.text for steer in self.steers)]
        self.outputs[:0] = [output for steer in self.steers for output in steer.outputs]
        self.steers, self.refused, self.returning = [], [], False

    def restore(self) -> list[Effect]:
        """Move the prompts back into the editor."""
        restored: list[Effect] = [Edit("\n".join(self.prompts), keep=True)] if self.prompts else []
        self.prompts.clear()
        return restored

    def recall(self) -> list[Effect]:
        """Take the last prompt back into the editor, or the words that wait for the running turn."""
        if self.prompts:
            return [Edit(self.prompts.pop())]
        if not self.steers or self.returning:
            return []
        self.returning = True
        return [Withdraw()]
