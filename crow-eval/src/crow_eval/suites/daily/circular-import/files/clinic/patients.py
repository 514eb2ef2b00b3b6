"""The patients."""

from clinic.visits import Visit, latest
from clinic.bills import total


class Patient:
    def __init__(self, name, born):
        self.name = name
        self.born = born
        self.visits: list[Visit] = []


def age_group(patient, year):
    age = year - patient.born
    if age < 18:
        return "child"
    return "adult" if age < 65 else "senior"


def describe(patient):
    """Return a line about a patient and the last visit."""
    visit = latest(patient)
    last = f"last here in {visit.year}: {visit.reason}" if visit else "never here"
    return f"{patient.name}, born {patient.born}, {last}"


def owes(patient):
    """Return what all visits of a patient cost."""
    return total(patient)
