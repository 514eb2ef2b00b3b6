"""Lanes: S is surface, A is air, N leaves after 22:00."""

LIMIT_GRAMS = 2_000


def is_small(parcel):
    return parcel["grams"] <= LIMIT_GRAMS


def is_late(parcel):
    return parcel["due_hours"] < 12


def lane_for(parcel):
    if is_late(parcel) and is_small(parcel):
        return "N"
    return "A" if parcel["due_hours"] < 48 else "S"
