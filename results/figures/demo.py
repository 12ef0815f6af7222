"""Draw README's picture, the demo's losses by length: python results/figures/demo.py"""

import csv
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FOLDER = Path(__file__).parent
NAMES = {
    "demo_softmax": "softmax",
    "demo_ssmax": "SSMax",
    "demo_lssar": "LSSAR",
    "demo_hybrid": "windows + FoX",
}
ROLLING = 1.500  # softmax with a rolling window of 128, at 2,048 bytes


def main() -> None:
    blocks: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    with (FOLDER.parent / "demo/rows.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["rope"] == "none" and row["measure"] == "loss":
                blocks[row["run"], int(row["length"])].append(float(row["value"]))
    figure, axes = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    for run, name in NAMES.items():
        lengths = sorted(length for other, length in blocks if other == run)
        losses = [sum(blocks[run, n]) / len(blocks[run, n]) for n in lengths]
        axes.plot(lengths, losses, marker="o", label=name)
    axes.axhline(ROLLING, color="black", linestyle="--", label="softmax, rolling window of 128")
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n:,} ({n // lengths[0]}x)" for n in lengths])
    axes.set_xlabel("bytes of context (trained at 128)")
    axes.set_ylabel("loss, nats a byte")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(FOLDER / "demo.png", dpi=130)


if __name__ == "__main__":
    main()
