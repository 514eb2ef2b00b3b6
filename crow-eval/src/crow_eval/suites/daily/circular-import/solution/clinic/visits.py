"""Visits of patients."""

from clinic.people import FEES, Patient, Visit, age_group, latest

__all__ = ["FEES", "Patient", "Visit", "age_group", "latest"]
