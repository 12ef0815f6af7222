"""evals/output.py: tables, and the lines and legends of figures."""

from matplotlib.figure import Figure

from evals.output import Curve, draw_curves, legend_below, length_table, run_table

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
    assert len({container.lines[0].get_marker() for container in axes.containers}) == len(names)


def test_runs_are_described_once():
    results = [
        {"run": run, "normaliser": normaliser, "step": 5, "train_len": 64, "lengths": lengths}
        for run, normaliser, lengths in (
            (
                "a",
                "softmax",
                [{"length": 64, "reason": None, "loss": 1.5}, {"length": 128, "reason": "no"}],
            ),
            ("mine", "lssa (reweight_p = 15)", [{"length": 64, "reason": None, "loss": 12.25}] * 2),
        )
    ]
    assert run_table(results).splitlines() == [
        "run   normaliser              step  trained at",
        "----  ----------------------  ----  ----------",
        "a     softmax                    5          64",
        "mine  lssa (reweight_p = 15)     5          64",
    ]
    assert length_table(results, lambda entry: (entry["loss"], None)).splitlines() == [
        "run           64         128",
        "----  ----------  ----------",
        "a      1.5000 ±-           -",
        "mine  12.2500 ±-  12.2500 ±-",
    ]
