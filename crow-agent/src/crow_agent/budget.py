"""A limit of what an agent may use in all its prompts."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from crow_extensions.spending import Spending, limit_calls

from crow_agent.errors import BudgetSpent

if TYPE_CHECKING:
    from crow_core.app import Crow


@dataclass
class Budget(Spending):
    """The most that an agent, its sub-agents included, may use in all its prompts; None means no limit.

    A turn that reaches a limit ends before its next model call; BudgetSpent is raised then, and for every later prompt.
    The minutes count from the first prompt on. A limit of money needs models with prices.
    Of another agent than crow's own, tokens and cost are known when its turns end, requests never.
    """

    def check(self) -> None:
        """Raises BudgetSpent if a limit is reached."""
        if sentence := self.describe_reached():
            raise BudgetSpent(sentence, spent=dict(self.spent), limits=self.limits)


def limit_spending(crow: "Crow", budget: Budget) -> None:
    """Count what all sessions of an app use, and end each turn before a model call that the budget does not cover."""
    limit_calls(crow, lambda session: budget)
