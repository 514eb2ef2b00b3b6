"""Pancakes for as many friends as come."""

SERVES = 4
RECIPE = {"flour (g)": 200, "milk (ml)": 400, "eggs": 2, "butter (g)": 30}


def amounts(people: int) -> dict[str, float]:
    """What to put into the bowl for that many people."""
    if people < 1:
        raise ValueError("Pancakes are for at least one person.")
    return {name: amount * (people // SERVES) for name, amount in RECIPE.items()}


def shopping_list(people: int) -> str:
    """One line for each ingredient."""
    return "\n".join(f"{amount:g} {name}" for name, amount in amounts(people).items())
