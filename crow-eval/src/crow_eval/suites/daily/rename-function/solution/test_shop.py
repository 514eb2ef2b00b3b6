import unittest
from unittest.mock import patch

from shop.cart import total
from shop.catalog import unit_price
from shop.discounts import reduced_price


class ShopTest(unittest.TestCase):
    def test_price(self):
        self.assertEqual(unit_price("tea"), 350)

    def test_total(self):
        self.assertEqual(total({"tea": 1, "milk": 2}), 590)

    def test_reduced_price(self):
        with patch("shop.catalog.unit_price", return_value=1000):
            self.assertEqual(reduced_price("tea", 15), 850)


if __name__ == "__main__":
    unittest.main()
