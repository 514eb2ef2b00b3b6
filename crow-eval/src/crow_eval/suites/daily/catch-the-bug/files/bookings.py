"""Bookings of a meeting room. Times are whole hours of one day."""


class Conflict(Exception):
    """The room is taken."""


class Room:
    """A room, and who has booked it when."""

    def __init__(self, opens=8, closes=18):
        self.opens = opens
        self.closes = closes
        self.bookings = []

    def book(self, name, start, end):
        """Book the room for somebody, from the hour `start` to the hour `end`.

        A booking may begin when another one ends. Raise ValueError if the booking does not end after it begins, or is
        not within the time when the room is open, and Conflict if the room is taken for a part of the time. Then no
        booking is made.
        """
        if start >= end:
            raise ValueError("a booking ends after it begins")
        if start < self.opens or end > self.closes:
            raise ValueError(f"the room is open from {self.opens} to {self.closes}")
        for taken_start, taken_end, _ in self.bookings:
            if start < taken_end and taken_start < end:
                raise Conflict(f"the room is taken from {taken_start} to {taken_end}")
        self.bookings.append((start, end, name))

    def cancel(self, name):
        """Cancel all bookings of somebody, and return how many these were."""
        before = len(self.bookings)
        self.bookings = [booking for booking in self.bookings if booking[2] != name]
        return before - len(self.bookings)

    def plan(self):
        """Return the bookings as tuples (start, end, name), in the order of the day."""
        return sorted(self.bookings)

    def gaps(self):
        """Return when the room is open and not booked, as tuples (start, end), in the order of the day."""
        found = []
        last = self.opens
        for start, end, _ in self.plan():
            if last < start:
                found.append((last, start))
            last = end
        if last < self.closes:
            found.append((last, self.closes))
        return found
