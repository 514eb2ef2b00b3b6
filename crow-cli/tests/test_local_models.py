"""The model that `crow setup` recommends for a machine."""

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from crow_cli.local_models import GB, choose_local_model, describe_recommendation, read_local_models

if TYPE_CHECKING:
    from crow_testing.command_fixtures import Machine


@pytest.mark.parametrize(
    ("memory", "cores", "name"),
    [
        (2, 2, ""),
        (4, 2, "qwen2.5-coder:1.5b"),
        (8, 1, "qwen2.5-coder:1.5b"),
        (8, 4, "nemotron-3-nano:4b"),
        (16, 8, "qwen3.5:9b"),
        (32, 8, "qwen3-coder:30b"),
        (128, 16, "gpt-oss:120b"),
    ],
)
def test_largest_model_that_fits_and_is_fast_enough_is_chosen(memory: int, cores: int, name: str):
    chosen = choose_local_model(memory * GB, cores)
    assert (chosen.name if chosen else "") == name


def test_recommendation_says_what_to_expect():
    said = describe_recommendation(4 * GB, 2)
    assert said.startswith("For this machine (4 GB of memory and 2 cores): qwen2.5-coder:1.5b, a file of 1.1 GB")
    assert "about 10 tokens a second. In crow's tests" in said
    assert describe_recommendation(32 * GB, 8).endswith(" tokens a second.")
    assert "Choose a provider" in describe_recommendation(1 * GB, 1)


def test_table_is_in_order_and_names_its_sources():
    models = read_local_models()
    assert all(one.size < other.size for one, other in pairwise(models))
    assert all(one.active <= one.size and one.source for one in models)


@pytest.mark.anyio
async def test_setup_recommends_a_model(machine: "Machine"):
    done = await machine.crow("setup", "--list")
    assert done.code == 0
    assert "this machine (" in done.out + done.err
