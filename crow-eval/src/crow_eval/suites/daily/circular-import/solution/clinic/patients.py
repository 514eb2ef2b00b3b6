"""The patients."""

from clinic.bills import total
from clinic.people import Patient, Visit, age_group, latest

__all__ = ["Patient", "Visit", "age_group", "describe", "latest", "owes", "total"]


def describe(patient):
    """Return a line about a patient and the last visit."""
    visit = latest(patient)
    last = f"last here in {visit.year}: {visit.reason}" if visit else "never here"
    return f"{patient.name}, born {patient.born}, {last}"


def owes(patient):
    """Return what all visits of a patient cost."""
    return total(patient)
