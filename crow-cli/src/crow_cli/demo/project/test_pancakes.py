# ruff: noqa: PT009, PT027
# pyright: basic, reportMissingImports=false
import unittest

import pancakes


class Pancakes(unittest.TestCase):
    def test_four_people_take_the_recipe_as_it_is(self) -> None:
        self.assertEqual(pancakes.amounts(4), pancakes.RECIPE)

    def test_six_people_need_half_as_much_again(self) -> None:
        self.assertEqual(pancakes.amounts(6)["eggs"], 3)

    def test_eight_people_need_twice_as_much(self) -> None:
        self.assertEqual(pancakes.shopping_list(8), "400 flour (g)\n800 milk (ml)\n4 eggs\n60 butter (g)")

    def test_nobody_gets_no_pancakes(self) -> None:
        with self.assertRaises(ValueError):
            pancakes.amounts(0)
