"""The port to GEPA, which chooses parents, samples tasks and keeps candidates; crow runs the tasks and asks the model.

L. A. Agrawal et al., GEPA: Reflective Prompt Evolution Can Outperform Reinforcement Learning, arXiv:2507.19457 (2025).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from gepa import optimize_anything as gepa

MINIBATCH = 3
"""Tasks that a proposal sees the runs of."""


class Steps(Protocol):
    """The steps of a search that crow makes. They are called in the thread of `search`."""

    @property
    def question(self) -> str:
        """The template of the words to the model that proposes, with `<curr_param>` and `<side_info>`."""
        ...

    def evaluate(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, dict[str, Any]]]:
        """Run pairs of a candidate and a task; return the score of each, from 0 to 1, and what a proposal may see."""
        ...

    def propose(self, question: str) -> str:
        """Ask the model for another text."""
        ...

    def choose_parent(self, text: str) -> None:
        """Note the candidate that the next one is made from."""
        ...

    def accept(self, text: str, score: float) -> None:
        """Note the score of a candidate on all validation tasks."""
        ...

    def is_over(self) -> bool:
        """Return True if no further candidate is to be made."""
        ...


class Listener:
    """Passes the events of GEPA on."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def on_candidate_selected(self, event: Mapping[str, Any]) -> None:
        """Pass on the parent of the next candidate."""
        self._steps.choose_parent(get_text(event["candidate"]))

    def on_valset_evaluated(self, event: Mapping[str, Any]) -> None:
        """Pass on a score."""
        self._steps.accept(get_text(event["candidate"]), event["average_score"])


class Silence:
    """The log of GEPA, which nobody reads."""

    def log(self, message: str) -> None:
        """Drop a message."""


def get_text(candidate: Mapping[str, str]) -> str:
    """Return the text of a candidate, which GEPA wraps in a dict of one key."""
    return next(iter(candidate.values()))


def search(text: str, train: Sequence[str], validation: Sequence[str], steps: Steps, seed: int) -> None:
    """Search for a better text, from `text` on, until `steps` says that it is over. Equal answers lead to equal steps.

    Raises what `steps.evaluate` raises. Errors of `steps.propose` are dropped: `is_over` has to be True then.
    """
    optimize = cast(Any, gepa).optimize_anything  # its types are unknown in part
    engine: Any = {"seed": seed, "parallel": False, "frontier_type": "instance", "track_best_outputs": False}
    reflection: Any = {
        "skip_perfect_score": True,
        "perfect_score": 1.0,
        "reflection_minibatch_size": min(MINIBATCH, len(train)),
        "reflection_lm": steps.propose,
        "reflection_prompt_template": steps.question,
    }

    def is_over(state: object) -> bool:
        return steps.is_over()

    rest: Any = {"stop_callbacks": is_over, "callbacks": [Listener(steps)]}
    optimize(
        text,
        batch_evaluator=steps.evaluate,
        dataset=[*train],
        valset=[*validation],
        config=gepa.GEPAConfig(
            engine=gepa.EngineConfig(**engine),
            reflection=gepa.ReflectionConfig(**reflection),
            tracking=gepa.TrackingConfig(logger=Silence()),
            **rest,
        ),
    )
