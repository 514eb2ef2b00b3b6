import unittest

from bookings import Conflict, Room


class BookTest(unittest.TestCase):
    def setUp(self):
        self.room = Room()
        self.room.book("Ann", 10, 13)

    def test_bookings_may_touch(self):
        self.room.book("Bob", 13, 14)
        self.room.book("Cem", 9, 10)
        self.assertEqual(self.room.plan(), [(9, 10, "Cem"), (10, 13, "Ann"), (13, 14, "Bob")])

    def test_overlap_is_a_conflict_and_changes_nothing(self):
        for start, end in ((10, 13), (9, 11), (12, 14), (11, 12), (9, 14), (10, 11), (12, 13)):
            with self.subTest(start=start, end=end):
                with self.assertRaises(Conflict):
                    self.room.book("Bob", start, end)
                self.assertEqual(self.room.plan(), [(10, 13, "Ann")])

    def test_booking_ends_after_it_begins(self):
        for start, end in ((15, 15), (16, 15)):
            with self.subTest(start=start, end=end), self.assertRaises(ValueError):
                self.room.book("Bob", start, end)

    def test_booking_is_within_the_opening_hours(self):
        for start, end in ((7, 9), (17, 19), (5, 6), (20, 22)):
            with self.subTest(start=start, end=end), self.assertRaises(ValueError):
                self.room.book("Bob", start, end)
        self.assertEqual(self.room.plan(), [(10, 13, "Ann")])

    def test_whole_day_can_be_booked(self):
        room = Room(6, 9)
        room.book("Ann", 6, 9)
        self.assertEqual(room.gaps(), [])


class CancelTest(unittest.TestCase):
    def test_bookings_of_one_person_are_cancelled(self):
        room = Room()
        room.book("Ann", 8, 9)
        room.book("Anna", 9, 10)
        room.book("Ann", 11, 12)
        self.assertEqual(room.cancel("Ann"), 2)
        self.assertEqual(room.plan(), [(9, 10, "Anna")])
        self.assertEqual(room.cancel("Ann"), 0)


class GapsTest(unittest.TestCase):
    def test_empty_day(self):
        self.assertEqual(Room(7, 9).gaps(), [(7, 9)])

    def test_gaps_before_between_and_after(self):
        room = Room()
        room.book("Ann", 15, 17)
        room.book("Bob", 9, 10)
        room.book("Cem", 10, 12)
        self.assertEqual(room.gaps(), [(8, 9), (12, 15), (17, 18)])


if __name__ == "__main__":
    unittest.main()
