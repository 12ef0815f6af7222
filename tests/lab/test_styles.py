"""lab/styles.py: the colours of variants."""

from lab.styles import COLOURS, GREY, variant_styles


def test_a_variant_has_one_colour_in_all_figures():
    alone = variant_styles(["lssar_p15_warmup"])["lssar_p15_warmup"]
    names = [
        "mine",
        "softmax_seed=1",
        "softmax_seed=2, lr 0.002",
        "lssar_p15_warmup: lssa (reweight_p = 15)",
    ]
    mine, first, second, lssar = variant_styles(names).values()
    assert (
        lssar["color"] == alone["color"] != first["color"] == second["color"] == COLOURS["softmax"]
    )
    assert mine["color"] not in {first["color"], lssar["color"], GREY}
    assert first["linestyle"] != second["linestyle"] and first["marker"] != second["marker"]
