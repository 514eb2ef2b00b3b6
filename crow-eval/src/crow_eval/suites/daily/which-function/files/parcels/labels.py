"""The labels that are printed on parcels."""

NAMES = {"S": "Surface", "A": "Air mail", "N": "Night courier"}


def night_courier_label(parcel):
    return f"*** {NAMES['N']} *** {parcel['to']}"


def label(parcel, lane):
    if lane == "N":
        return night_courier_label(parcel)
    return f"{NAMES[lane]}: {parcel['to']}"
