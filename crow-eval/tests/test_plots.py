"""Plots of the pages."""

import re

from crow_eval.plots import Bar, Dots, plot_bars, plot_dots


def test_the_axis_of_small_costs_has_plain_numbers():
    ticks = re.findall(r'class="tick"[^>]*>([^<]*)<', plot_bars([Bar("", [0.0001], "")], title="Cost"))
    assert ticks == ["0", "0.00005", "0.0001"]


def test_the_last_tick_of_an_axis_has_the_unit_and_ends_inside_the_plot():
    svg = plot_dots([Dots("crow", [(90_000, "", "90k")])], title="Tokens of each run", unit="tokens")
    ticks = re.findall(r'class="tick" x="([^"]*)" y="[^"]*" text-anchor="([^"]*)">([^<]*)<', svg)
    assert ticks == [("24.0", "middle", "10k"), ("360.0", "end", "100k tokens")]
