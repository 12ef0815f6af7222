"""evals/output.py: the lines and legends of the evaluations' figures."""

from matplotlib.figure import Figure

from evals.output import Curve, draw_curves, legend_below, line_styles

RESULT = {"train_len": 64}


def test_every_line_is_told_apart_and_named():
    names = [f"mine_{i}: softmax" for i in range(10)]
    figure = Figure(figsize=(8, 4))
    axes = figure.subplots()
    draw_curves(axes, [Curve(name, [64, 128], [1.0, 2.0]) for name in names], [64, 128], [RESULT])
    legend_below(figure, 1)
    assert len({container.lines[0].get_color() for container in axes.containers}) == len(names)
    assert {text.get_text() for text in figure.legends[0].get_texts()} >= {*names}
    assert figure.get_figheight() > 4  # for the legend's rows
    assert len({style["marker"] for style in line_styles(names).values()}) == len(names)
