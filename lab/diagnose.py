"""How attention changes as contexts grow: statistics of each layer, head and length.

    python -m lab.diagnose runs/lssar
    python -m lab.diagnose runs/softmax runs/ssmax runs/lssar --lengths 1024 4096 16384
    torchrun --standalone --nproc_per_node=8 -m lab.diagnose runs/lssar --tokens 1048576

The validation text is cut into blocks of the longest length. The statistics are means over the last
128 rows (queries) of each block, or half the shortest length, in windows of each length that all
end there. So the queries are the same, with more context. They measure how wide the scores are, how
concentrated the weights, and how much goes to the first token (the attention sink).
NormSoftmax's Figures 2a and 4 are those of the checkpoints that `train.keep_every` kept.

Writes diagnose.json and diagnose.png into the run folder and adds the means to its rows.csv. The
figure has a curve for each layer. Several runs get one more figure, with a curve for each.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from evals import common, output
from evals.common import Blocks, add_arguments, mean_and_stderr, parse_arguments
from evals.output import Result
from evals.rows import text_key
from infra.cli import ArgumentParser, run_main
from infra.distributed import World, join_world
from lab.attention_statistics import STATISTICS, model_statistics
from model import GPT
from positions import RopeScaling


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    listed = [f"  {name:18}{meaning}" for name, meaning in STATISTICS.items()]
    heading = "p = |A| / sum |A| over the n visible keys, the weights of a softmax:"
    parser.epilog = "\n".join([heading, *listed])
    lengths_help = "window lengths (default: 1, 2, 4, 8, 16 x the training length)"
    add_arguments(parser, lengths_help, tokens=2**18)
    return parse_arguments(parser, "diagnose")


def main() -> None:
    args = parse_args()
    with join_world(args.device) as world:
        runs, picture = common.open_runs(args, world)
        all_blocks = common.open_blocks(args, runs)
        n_rows = max(1, min(128, all_blocks[0].lengths[0] // 2))

        def measure(i: int, model: GPT, step: int) -> tuple[dict[str, Any], str, list[Any]]:
            blocks = all_blocks[i]
            data = blocks.describe() | {"rows": n_rows}
            scores = [
                score(model, blocks, n, n_rows, args.rope_scaling, world) for n in blocks.lengths
            ]
            at_lengths = [
                summarise(n, each) for n, each in zip(blocks.lengths, scores, strict=True)
            ]
            text = f"{text_key(data)}, {n_rows} rows"
            return {"data": data, "lengths": at_lengths}, text, measured_means(at_lengths)

        common.evaluate("diagnose", args, world, runs, picture, measure, tables, plot)


# ---------------------------------------------------------------- score
def score(
    model: GPT, blocks: Blocks, length: int, n_rows: int, rope: RopeScaling, world: World
) -> Tensor | str:
    """Statistics of every block, (n_blocks, n_layer, n_head, len(STATISTICS)), or why there are
    none.
    """

    def statistics(items: Sequence[int]) -> Tensor:
        ends = [(blocks.n_skipped + i + 1) * blocks.longest for i in items]
        windows = [blocks.stream.read(end - length, length) for end in ends]
        with model.autocast():
            tokens = torch.from_numpy(np.stack(windows)).to(world.device)  # (B, T)
            return model_statistics(model, tokens, rope, n_rows)

    return common.score_all(world, f"{length} tokens", blocks.n_blocks, statistics)


# ---------------------------------------------------------------- summary and tables
def summarise(length: int, scores: Tensor | str) -> dict[str, Any]:
    """An entry of diagnose.json's "lengths": means by head, and over all heads with their error."""
    if isinstance(scores, str):
        return {"length": length, "reason": scores}
    entry: dict[str, Any] = {
        "length": length,
        "reason": None,
        "mean": {},
        "stderr": {},
        "heads": {},
    }
    # (n_blocks, n_layer, n_head)
    for name, of_heads in zip(STATISTICS, scores.unbind(-1), strict=True):
        mean, stderr = mean_and_stderr(of_heads.mean((1, 2)))
        entry["mean"][name] = mean
        entry["stderr"][name] = stderr
        entry["heads"][name] = of_heads.mean(0).tolist()
    return entry


def measured_means(at_lengths: list[dict[str, Any]]) -> list[tuple[int, None, str, float]]:
    """(length, no block, statistic, mean); NaN where the length was rejected."""
    return [
        (entry["length"], None, name, entry["mean"][name] if "mean" in entry else math.nan)
        for entry in at_lengths
        for name in STATISTICS
    ]


def mean_of(name: str) -> output.Value:
    """A statistic's mean over layers and heads, and its standard error over blocks."""
    return lambda entry: (entry["mean"][name], entry["stderr"][name])


def tables(results: list[Result]) -> str:
    """A table for each statistic: runs down, lengths across; means over layers and heads."""
    data = results[0]["data"]
    texts = ", ".join(dict.fromkeys(result["data"]["dir"] for result in results))
    parts = [
        f"The last {data['rows']} rows of {data['blocks']} blocks of {data['block_length']} tokens of "
        f"{texts}, in windows of each length; RoPE scaling {output.format_rope(*results)}.\n"
        "Means over layers and heads, ± standard error over blocks.",
        output.run_table(results),
    ]
    for name, meaning in STATISTICS.items():
        parts.append(f"{name}: {meaning}\n{output.length_table(results, mean_of(name))}")
    return "\n\n".join(parts + output.rejections(results)) + "\n"


# ---------------------------------------------------------------- figure
def plot(results: list[Result], path: Path) -> None:
    """A panel for each statistic: a curve for each layer of a single run, or for each of several
    runs.
    """
    n_columns = math.ceil(len(STATISTICS) / 2)
    lengths = [entry["length"] for entry in results[0]["lengths"]]
    figure = Figure(figsize=(3.2 * n_columns, 6.8), layout="constrained")
    for name, axes in zip(STATISTICS, figure.subplots(2, n_columns).flat, strict=True):
        is_single = len(results) == 1
        curves = (
            layer_curves(results[0], name)
            if is_single
            else output.length_curves(results, mean_of(name))
        )
        output.draw_curves(axes, curves, lengths, results)
        axes.set(title=name, xlabel="window length (tokens)")
        if name == "effective_keys":  # from one key to all
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
    output.legend_below(figure, 6)
    output.save_figure(figure, path)


def layer_curves(result: Result, name: str) -> list[output.Curve]:
    """A statistic's means over the heads of each layer."""
    means = {
        e["length"]: np.mean(e["heads"][name], axis=1) for e in result["lengths"] if "heads" in e
    }
    layers = np.array([*means.values()]).T
    return [output.Curve(f"layer {i}", [*means], [*layer]) for i, layer in enumerate(layers)]


if __name__ == "__main__":
    run_main(main)
