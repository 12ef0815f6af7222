"""Colours, markers and dashes of variants, the same in all figures of the lab."""

import re
from collections.abc import Sequence
from typing import Any

from evals.output import MARKERS

DASHES = ("-", "--", "-.", ":")
N_SHOWN = 7  # variants in colour where nobody chose them: more cannot be told apart
GREY = "0.75"  # of all others
COLOURS = {  # of variants that have one colour in all figures, by the names of their configs
    "softmax": "C0", "softmax_qk_norm": "C1", "qk_norm_softmax": "C1",
    "hybrid_fox": "C2", "ssmax_qk_norm": "C3", "qk_norm_ssmax": "C3",
    "lssar_p15_warmup": "C4", "lssar": "C4", "stick_breaking": "C5", "alibi": "C6",
    "ssmax": "C8", "lssar_p15": "C9", "fox": "k", "softmax_continued": "C1", "hybrid_16_fox_4": "C2",
}  # fmt: skip
FREE_COLOURS = ("k", "C8", "C9", "C1", "C6", "C2", "C5", "C4", "C3", "C0")  # of the others, in turn


def variant_of(label: str) -> str:
    """The name without its seed, dtype, rate and more: '(b) ssmax_bf16_seed=2, lr 0.002' ->
    'ssmax'.
    """
    return re.sub(r"^\(\w\) |_bf16|_?seed=?\d+", "", re.split(", |: ", label)[0])


def variant_styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour, marker and dashes of each line: a colour a variant, grey for those beyond all
    colours.

    Lines of one variant, such as its seeds, differ in markers and dashes.
    """
    variants = {name: variant_of(name) for name in names}
    shown = [*dict.fromkeys(variants.values())]
    colours = {variant: COLOURS[variant] for variant in shown if variant in COLOURS}
    free = [colour for colour in FREE_COLOURS if colour not in colours.values()]
    others = [variant for variant in shown if variant not in colours]
    colours |= zip(others, free, strict=False)
    styles = {}
    for i, (name, variant) in enumerate(variants.items()):
        n_earlier = [*variants.values()][:i].count(variant)
        styles[name] = {
            "color": colours.get(variant, GREY),
            "marker": MARKERS[i % len(MARKERS)],
            "linestyle": DASHES[n_earlier % len(DASHES)],
        }
    return styles
