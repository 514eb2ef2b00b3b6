"""Visits of patients."""

FEES = {"child": 10, "adult": 30, "senior": 20}


class Visit:
    def __init__(self, patient, year, reason):
        if not isinstance(patient, Patient):
            raise TypeError("a visit is one of a patient")
        self.patient = patient
        self.year = year
        self.reason = reason
        patient.visits.append(self)

    def fee(self):
        """Return what the visit costs, by the age of the patient at that time."""
        return FEES[age_group(self.patient, self.year)]


def latest(patient):
    """Return the last visit of a patient, or None."""
    return max(patient.visits, key=lambda visit: visit.year, default=None)


from clinic.patients import Patient, age_group
