"""Bills for patients."""

from clinic.visits import Visit
from clinic.patients import Patient


def bill(patient: Patient):
    """Return a bill: a line for each visit, and the total."""
    return "\n".join([*(line(visit) for visit in patient.visits), f"total {total(patient)}"])


def line(visit: Visit):
    return f"{visit.year} {visit.reason} {visit.fee()}"


def total(patient: Patient):
    return sum(visit.fee() for visit in patient.visits)
