"""Plots of the pages."""

import re

from crow_eval.plots import Bar, plot_bars


def test_the_axis_of_small_costs_has_plain_numbers():
    ticks = re.findall(r'class="tick"[^>]*>([^<]*)<', plot_bars([Bar("", [0.0001], "")], title="Cost"))
    assert ticks == ["0", "0.00005", "0.0001"]
