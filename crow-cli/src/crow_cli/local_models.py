"""Recommend a model for this machine by its memory and its cores."""

import os
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from crow_system.shortening import format_count

GB = 1_000_000_000
USABLE_MEMORY = 0.65
"""The part of the memory that a model and its context may take."""
CONTEXT = 1.5
"""GB for the context and the server, in addition to the file."""
READ_BY_CORE = 5.5
"""GB of a model that one core reads in a second: 1.1 GB and 5 tokens a second, measured with `just lab --threads 1`."""
MAX_CORES = 8
"""Cores from which on the memory is the limit."""
MIN_SPEED = 2.0
"""Tokens a second below which a model is too slow to work with."""


@dataclass(frozen=True)
class LocalModel:
    """An entry of `local_models.toml`."""

    name: str
    size: float
    """GB of its file."""
    active: float
    """GB that are read for each token."""
    source: str
    measured: str = ""
    """The results of crow's own measurements; "" if there are none."""

    def speed(self, cores: int) -> float:
        """Estimate the tokens that it writes in a second without a graphics card."""
        return min(cores, MAX_CORES) * READ_BY_CORE / self.active


@cache
def read_local_models() -> tuple[LocalModel, ...]:
    """Read the models, from the smallest to the largest."""
    data = tomllib.loads(files("crow_cli").joinpath("local_models.toml").read_text("utf-8"))
    return tuple(LocalModel(**entry) for entry in data["model"])


def choose_local_model(memory: int, cores: int) -> LocalModel | None:
    """Choose the largest model that fits into the memory, in bytes, and is fast enough; None if none is."""
    room = memory / GB * USABLE_MEMORY - CONTEXT
    fitting = [one for one in read_local_models() if one.size <= room and one.speed(cores) >= MIN_SPEED]
    return fitting[-1] if fitting else None


def describe_recommendation(memory: int, cores: int) -> str:
    """Say which model suits a machine, and what to expect of it."""
    machine = f"{memory / GB:.0f} GB of memory and {format_count(cores, 'core')}"
    model = choose_local_model(memory, cores)
    if model is None:
        return f"This machine ({machine}) is too small for a model of its own. Choose a provider."
    said = f" In crow's tests {model.measured}." if model.measured else ""
    return (
        f"For this machine ({machine}): {model.name}, a file of {model.size:g} GB (`ollama pull {model.name}`). "
        f"Without a graphics card it writes about {model.speed(cores):.0f} tokens a second.{said}"
    )


def recommend() -> str:
    """Say which model suits this machine."""
    import psutil  # slow to import, and few commands need it

    return describe_recommendation(psutil.virtual_memory().total, os.cpu_count() or 1)
