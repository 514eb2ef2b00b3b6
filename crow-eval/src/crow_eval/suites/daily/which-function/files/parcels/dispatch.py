"""Send parcels."""

from parcels.labels import label
from parcels.lanes import lane_for
from parcels.prices import price


def dispatch(parcel):
    """Return the label and the price of a parcel."""
    lane = lane_for(parcel)
    return label(parcel, lane), price(parcel, lane)


def dispatch_all(parcels):
    return [dispatch(parcel) for parcel in parcels]
