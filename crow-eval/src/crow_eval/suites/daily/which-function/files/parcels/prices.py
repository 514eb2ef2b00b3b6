"""What a parcel costs, in cents."""

NIGHT_SURCHARGE = 450


def base_price(parcel):
    return 300 + 2 * parcel["grams"] // 10


def price(parcel, lane):
    """Return the price in a lane; the night courier costs a surcharge."""
    return base_price(parcel) + (NIGHT_SURCHARGE if lane == "N" else 0)
