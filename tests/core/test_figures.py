"""evals/output.py: the colours and legends of all figures."""

from __future__ import annotations

from matplotlib.figure import Figure

from evals.output import COLOURS, GREY, MARKERS, N_SHOWN, Curve, draw_curves, legend_below, line_styles

RESULT = {"train_len": 64}


def test_a_variant_has_one_colour_in_all_figures():
    alone = line_styles(["lssar_p15_warmup"])["lssar_p15_warmup"]
    names = ["mine", "softmax_seed=1", "softmax_seed=2, lr 0.002", "lssar_p15_warmup: lssa (reweight_p = 15)"]
    mine, first, second, lssar = line_styles(names).values()
    assert lssar["color"] == alone["color"] != first["color"] == second["color"] == COLOURS["softmax"]
    assert mine["color"] not in {first["color"], lssar["color"], GREY}
    assert first["linestyle"] != second["linestyle"] and first["marker"] != second["marker"]


def test_beyond_seven_variants_lines_are_grey_and_named():
    names = [f"mine_{i}: softmax" for i in range(N_SHOWN + 3)]
    figure = Figure(figsize=(8, 4))
    axes = figure.subplots()
    draw_curves(axes, [Curve(name, [64, 128], [1.0, 2.0]) for name in names], [64, 128], [RESULT])
    legend_below(figure, 1)
    colours = [container.lines[0].get_color() for container in axes.containers]
    assert len(set(colours[:N_SHOWN])) == N_SHOWN and set(colours[N_SHOWN:]) == {GREY}
    assert {text.get_text() for text in figure.legends[0].get_texts()} >= {*names}
    assert figure.get_figheight() > 4  # for the legend's rows
    assert len({style["marker"] for style in line_styles(names).values()}) == len(names) <= len(MARKERS)
