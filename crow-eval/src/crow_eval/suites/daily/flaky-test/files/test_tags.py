import unittest

from tags import headline, most_used, slug


class TagsTest(unittest.TestCase):
    def test_slug(self):
        self.assertEqual(slug(["Tea", "Milk", "tea", "Rice"]), "tea-milk-rice")

    def test_headline(self):
        self.assertEqual(headline(["milk", "tea", "milk"]), "Milk, Tea")

    def test_most_used(self):
        self.assertEqual(most_used(["tea", "milk", "tea"]), "tea")


if __name__ == "__main__":
    unittest.main()
