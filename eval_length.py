"""The loss at 1x to 16x the training length, and with a rolling window of the training length.

    python eval_length.py runs/softmax runs/lssar                      # one table, one picture
    python eval_length.py runs/lssar/checkpoints/step_018865.pt --rope ntk theta=500000
    python eval_length.py EleutherAI/pythia-160m --data data/pythia    # any causal model: hub/causal.py
    python eval_length.py runs/softmax runs/lssar --draw               # again, from the rows, at once
    torchrun --standalone --nproc_per_node=8 eval_length.py runs/lssar --tokens 10485760

Every length scores the same targets: the last tokens of each block, as many as the shortest length
has. What a length adds is context alone. A rolling window keeps the last T keys of each layer, as a
decoder with a KV cache of T does: what softmax has for nothing. Blocks stand at the ends of
documents, one each. With several runs the table has what each is above the first one in its rolling
window, with the paired 95 % interval; runs that differ in their seed alone are one line.

Writes rows.csv into the run folder (see measure.py), and the picture.
"""

import infra.packages  # noqa: F401

import argparse
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas
import torch
from pandas import DataFrame
from torch import Tensor

import measure
from evaluation import (
    FACTORS,
    Blocks,
    Run,
    Scorer,
    add_arguments,
    load_hub,
    open_blocks,
    open_runs,
    picture_path,
    score_all,
    text_of,
)
from infra.cli import ArgumentParser, UserError, integer, positive_float, positive_int, run_main
from infra.distributed import World, join_world
from measure import Curve, Estimate, Losses, estimate, format_difference, read_losses
from positions import UNSCALED, RopeScaling

# of windows computed anew: a target sees 7/8 of one on average; 8 would cost twice as much
STRIDES = 4
N_PARTS = 200  # of a window by position, as in SSMax's Figure 5
UNITS = {"same_targets": "nats", "bits_per_byte": "bits a byte", "loss": "nats"}
KEYS = ("falls", "falls_by", "rises", "rises_by")  # see `key_measure`
LABELS = {"none": "unscaled", "ntk": "NTK", "yarn": "YaRN"}


class Setting(NamedTuple):
    """How a model is given its context."""

    scaling: RopeScaling
    window: int = 0  # 0: none
    anew: bool = False  # windows computed anew, in place of a rolling one
    sinks: int = 0  # first tokens that a rolling window keeps

    @property
    def columns(self) -> dict[str, str]:
        """Of its rows."""
        window = f"{self.window} recomputed" if self.anew else str(self.window)
        if self.sinks:
            window += f" + {self.sinks} sinks"
        return {"window": window, "scaling": self.scaling.name}

    @property
    def label(self) -> str:
        if self.window:
            return f"window {self.columns['window'].replace('recomputed', 'anew')}"
        return LABELS.get(self.scaling.name, self.scaling.name)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add_arguments(parser)
    add = parser.add_argument
    lengths_help = "(default: 1, 2, 4, 8, 16 x the training length)"
    add("--lengths", nargs="+", type=positive_int, metavar="T", help=lengths_help)
    train_help = "training length of models of transformers (default: their config's)"
    add("--train-len", type=positive_int, default=0, metavar="T", help=train_help)
    rope_help = "RoPE scalings: none, ntk, yarn, theta=500000 (default: none ntk)"
    add("--rope", nargs="+", default=["none", "ntk"], metavar="SCALING", help=rope_help)
    window_help = "rolling windows, 0 for none (default: the training length)"
    add("--window", nargs="+", type=integer(0, 10**12), metavar="W", help=window_help)
    sinks_help = "also rolling windows that keep the first N tokens (models of transformers)"
    add("--sinks", type=positive_int, default=0, metavar="N", help=sinks_help)
    anew_help = "also windows that are computed anew for each target, positions from 0"
    add("--recomputed", action="store_true", help=anew_help)
    all_help = "also the loss over all tokens of the blocks, in windows of each length"
    add("--all-tokens", action="store_true", help=all_help)
    position_help = f"also the loss by position at the longest length, in {N_PARTS} parts"
    add("--by-position", action="store_true", help=position_help)
    files_help = "text files in place of a dataset, by each model's own tokeniser"
    add("--files", nargs="+", metavar="PATTERN", help=files_help)
    add("--bits", action="store_true", help="also bits a byte of the same targets")
    key_help = "also the share of targets whose loss falls beyond T by more than 0.5, or this"
    add("--key-tokens", nargs="?", type=positive_float, const=0.5, metavar="NATS", help=key_help)
    missing_help = "leave out runs whose rows are there, of all blocks, settings and lengths"
    add("--missing", action="store_true", help=missing_help)
    add("--draw", action="store_true", help="table and picture of the rows that are there")
    out_help = "picture (default: eval_length.png above the runs)"
    add("--out", type=Path, metavar="FILE", help=out_help)
    args = parser.parse_args(argv)
    args.scalings = [RopeScaling(name) for name in dict.fromkeys(args.rope)]
    measure.check_figure(args.out)
    if args.key_tokens and args.window == [0]:
        raise UserError("--key-tokens: compares with a window: expected another --window than 0")
    return args


def main() -> None:
    args = parse_args()
    if args.draw:
        runs = open_runs(args.runs, None, args.train_len, bool(args.files))
        args.lengths = choose_lengths(args, runs)
        show(args, runs, [run.step for run in runs], None)
        return
    with join_world(args.device) as world:
        runs = open_runs(args.runs, world, args.train_len, bool(args.files))
        blocks = open_all(args, runs)
        steps = []
        for run, of_run in zip(runs, blocks, strict=True):
            if args.missing and all(world.gather_objects(has_rows(args, run, of_run))):
                steps.append(run.step)
                continue
            model, step = run.scorer(world)
            rows = measure_run(world, run, model, step, of_run, args)
            if world.is_main:
                measure.write_rows(run.folder, rows)
            steps.append(step)
        if world.is_main:
            show(args, runs, steps, text_of(blocks[0].stream))


def open_all(args: argparse.Namespace, runs: Sequence[Run]) -> list[Blocks]:
    """The blocks of each run, of one text. Raises UserError: they differ; see `open_blocks`."""
    args.lengths = choose_lengths(args, runs)
    if args.files:
        files = load_hub("files")
        return list(files.open_files(runs, args.files, args.lengths[-1], args.tokens))
    streams = [run.text(args.data, args.split) for run in runs]
    for run, stream in zip(runs, streams, strict=True):
        if text_of(stream) != text_of(streams[0]):
            has = f"{streams[0].folder} of {runs[0].source}"
            raise UserError(f"{run.source}: {stream.folder} is another text than {has}: --data")
    return [open_blocks(stream, args.lengths[-1], args.tokens) for stream in streams]


def choose_lengths(args: argparse.Namespace, runs: Sequence[Run]) -> list[int]:
    """Those given, else multiples of every run's training length; ascending.

    Raises UserError: one does not divide the longest, so that it would score other tokens.
    """
    own = {factor * run.train_len for run in runs for factor in FACTORS}
    lengths = sorted({*(args.lengths or own)})
    for length in lengths:
        if lengths[-1] % length:
            raise UserError(f"--lengths: {length} does not divide the longest, {lengths[-1]}")
    return lengths


def settings_of(args: argparse.Namespace, run: Run) -> list[Setting]:
    """A rolling window has no scaling: no distance in it is longer than in training.

    Learned positions have none beyond the last, so that a window is computed anew.
    """
    asked = [run.train_len] if args.window is None else args.window
    rolling = [Setting(UNSCALED, window) for window in dict.fromkeys(asked) if window]
    anew = [each._replace(anew=True) for each in rolling]
    if run.is_absolute:
        windows = anew
    else:
        windows = rolling + (anew if args.recomputed else [])
        if args.sinks:
            windows += [each._replace(sinks=args.sinks) for each in rolling]
    return [*windows, *(Setting(scaling) for scaling in run.scalings(args.scalings))]


def is_measured(argv: Sequence[str]) -> bool:
    """Whether the rows that a call with these arguments would write are there."""
    args = parse_args(argv)
    runs = open_runs(args.runs, None, args.train_len, bool(args.files))
    blocks = open_all(args, runs)
    return all(has_rows(args, run, of_run) for run, of_run in zip(runs, blocks, strict=True))


def has_rows(args: argparse.Namespace, run: Run, blocks: Blocks) -> bool:
    """Whether its step has each of the asked measures of all blocks, in all settings and lengths."""
    rows = measure.select(
        measure.read_rows(run.folder), run=run.name, step=run.step, text=text_of(blocks.stream)
    )
    counts = rows.groupby(["measure", "window", "scaling", "length"]).size()
    for setting, length in contexts_of(args, run):
        for name, _ in measures_of(args, setting, length):
            n_rows = 1 if "[" in name else len(blocks)
            if counts.get((name, *setting.columns.values(), length), 0) != n_rows:
                return False
    return True


# ---------------------------------------------------------------- scores
def contexts_of(args: argparse.Namespace, run: Run) -> Iterator[tuple[Setting, int]]:
    """Each setting at each length. Windows computed anew do not see what a length adds: one is all."""
    for setting in settings_of(args, run):
        for length in args.lengths[-1:] if setting.anew else args.lengths:
            yield setting, length


def measures_of(args: argparse.Namespace, setting: Setting, length: int) -> list[tuple[str, slice]]:
    """The names of the measures, and the targets of a window that each is the mean of."""
    same = slice(-args.lengths[0], None)
    measures = [("same_targets", same)]
    if args.bits or args.files:
        measures.append(("bits_per_byte", same))
    if args.key_tokens and not setting.window and length == args.lengths[-1]:
        measures += [(f"{name}>{args.key_tokens:g}", same) for name in KEYS]
    if args.all_tokens and not setting.anew:
        measures.append(("loss", slice(None)))
    if args.by_position and not setting.anew and length == args.lengths[-1]:
        n_parts = min(N_PARTS, length)
        edges = [i * length // n_parts for i in range(n_parts + 1)]
        measures += [(f"loss[{i}:{j}]", slice(i, j)) for i, j in itertools.pairwise(edges)]
    return measures


def measure_run(
    world: World, run: Run, model: Scorer, step: int, blocks: Blocks, args: argparse.Namespace
) -> list[tuple[Any, ...]]:
    """The rows of a run: whole sets."""
    rows: list[tuple[Any, ...]] = []
    text = text_of(blocks.stream)
    near: dict[int, Tensor] = {}
    for setting, length in contexts_of(args, run):
        measures = measures_of(args, setting, length)
        score = partial(score_block, model, blocks, setting, length, measures, near)
        label = f"{run.title}, {setting.label}, {length} tokens"
        scores = score_all(world, label, len(blocks), score)  # (blocks, measures)
        if isinstance(scores, str):
            if world.is_main:
                print(f"{run.title}, {setting.label}, at {length}: no result: {scores}")
            scores = torch.full((len(blocks), len(measures)), math.nan)
        for (name, _), values in zip(measures, scores.T, strict=True):
            where = (run.name, step, text, name, length, *setting.columns.values())
            if "[" in name:  # by position: of all blocks
                rows.append((*where, None, None, values.mean().item()))
                continue
            cells = zip(blocks.documents, values.tolist(), strict=True)
            rows += [(*where, block, *cell) for block, cell in enumerate(cells)]
    return rows


def score_block(
    model: Scorer,
    blocks: Blocks,
    setting: Setting,
    length: int,
    measures: Sequence[tuple[str, slice]],
    near: dict[int, Tensor],
    items: Sequence[int],
) -> Tensor:
    """The measures of one block, (1, measures) float64.

    The loss over all tokens is that of all windows of the block; the other measures are of its
    last window. near: of each block, the losses of the same targets in the first setting, which is
    a window, at the longest length.
    """
    (block,) = items
    start = blocks.starts[block]
    tokens = torch.from_numpy(blocks.stream.read(start, blocks.length + 1))
    same = measures[0][1]
    n_same = -same.start
    names = [name for name, _ in measures]
    if setting.anew:
        losses = recomputed_losses(model, tokens, setting.window, n_same)[None]
    else:
        n_windows = blocks.length // length if "loss" in names else 1
        windows = tokens[-n_windows * length - 1 :].unfold(0, length + 1, length)
        n_targets = n_same if all(part == same for _, part in measures) else length
        losses = model.losses(
            windows, n_targets, setting.window, setting.sinks, scaling=setting.scaling
        )
    losses = losses.double()  # (windows, targets)
    values = {name: losses[-1, part].mean() for name, part in measures}
    if "loss" in names:
        values["loss"] = losses.mean()
    if "bits_per_byte" in names:
        n_bytes = blocks.stream.n_bytes(start + blocks.length + 1 - n_same, n_same)
        values["bits_per_byte"] = losses[-1, same].sum() / (math.log(2) * n_bytes)
    if setting.window and length == blocks.length:
        near.setdefault(block, losses[-1, same])
    for name in names:
        if ">" in name:
            gain = near[block] - losses[-1, same] if block in near else losses[-1, same] * math.nan
            values[name] = key_measure(name, gain)
    return torch.stack([values[name] for name in names])[None]


def key_measure(name: str, gain: Tensor) -> Tensor:
    """A measure of key tokens, those whose loss a longer context changes by more than a margin.

    Of the gain of each target (n,), its loss in the window minus that with all of the context, and
    m the margin in nats, behind the name's ">":

        falls     share of targets with gain > m           falls_by   mean of gain where that is so
        rises     share of targets with gain < -m          rises_by   likewise, negative

    falls_by and rises_by are over all targets, 0 elsewhere: what these targets add to the mean gain.
    LongPPL (Fang et al. 2024, arXiv 2410.23771) chooses key tokens by another model's gain and takes
    their perplexity. Here the model's own gain chooses, which inflates it: a context that moves
    losses at random has falls, too, and as many rises. So the two are reported beside each other,
    and their sum, falls_by + rises_by, is what such noise leaves at 0.
    """
    kind, _, margin = name.partition(">")
    chosen = gain > float(margin) if kind.startswith("falls") else gain < -float(margin)
    return (gain * chosen if kind.endswith("_by") else chosen.double()).mean()


def recomputed_losses(model: Scorer, tokens: Tensor, context: int, n_targets: int) -> Tensor:
    """The losses of the last n_targets of tokens (N,), each given at most `context` before it.

    A window moves by a quarter of its tokens and scores those that it reaches, which so see at
    least three quarters of it (Press et al. 2021, arXiv 2012.15832, section 2; "Perplexity of
    fixed-length models" in the documentation of transformers).
    """
    stride = math.ceil(context / STRIDES)
    losses: list[Tensor] = []
    for end in range(len(tokens), len(tokens) - n_targets, -stride):
        window = tokens[max(0, end - context - 1) : end]
        losses.insert(0, model.losses(window[None], min(stride, len(window) - 1))[0])
    return torch.cat(losses)[-n_targets:]


# ---------------------------------------------------------------- views
class Line(NamedTuple):
    """A model in one setting: a line of the tables, a curve of the picture."""

    model: str
    setting: Setting
    losses: dict[int, Losses | None]  # by length

    @property
    def estimates(self) -> dict[int, Estimate | None]:
        return {length: estimate(each) if each else None for length, each in self.losses.items()}


def show(args: argparse.Namespace, runs: Sequence[Run], steps: list[int], text: str | None) -> None:
    """Print the tables and draw the pictures of rows. text: None is that of the newest rows."""
    models = name_models(runs, steps)
    tables = []
    for run, step, model in zip(runs, steps, models, strict=True):
        rows = measure.select(measure.read_rows(run.folder), run=run.name, step=step)
        if not (rows["measure"] == "same_targets").any():
            raise UserError(f"{run.folder}: no rows of step {step}: expected a call without --draw")
        tables.append(rows.assign(model=model))
    rows = pandas.concat(tables).drop_duplicates()
    text = text or str(measure.select(tables[0], measure="same_targets")["text"].iloc[-1])
    rows = measure.select(rows, text=text)
    sizes = [f"step {step}, {run.size}" for run, step in zip(runs, steps, strict=True)]
    if len({*sizes}) > 1:
        print("\nThe runs differ in size or steps:")
        for run, size in zip(runs, sizes, strict=True):
            print(f"  {run.name}: {size}")
    of_model = dict(zip(models, runs, strict=True))  # a run of each
    settings = [
        (model, setting) for model, run in of_model.items() for setting in settings_of(args, run)
    ]
    picture = args.out or picture_path(runs, "eval_length")
    train_lens = {run.train_len for run in runs}
    # tokens of several tokenisers do not compare, bytes do
    is_mixed = len({run.tokenizer for run in runs}) > 1
    drawn = "bits_per_byte" if is_mixed else "same_targets"
    n_same = rows[rows["measure"] == "same_targets"]["length"].min()
    for name, unit in UNITS.items():
        lines = read_lines(rows, settings, name, args.lengths)
        if lines and is_asked(args, name):
            what = "all tokens" if name == "loss" else f"the last {n_same} tokens"
            do_compare = len(lines) > 1 and (name == drawn or not is_mixed)
            print_losses(lines, f"{unit} of {what}", text, do_compare)
            if name == drawn:
                draw_losses(lines, picture, train_lens, f"loss ({unit})")
    if args.key_tokens:
        print_keys(rows, settings, args)
    if args.by_position:
        picture = picture.with_stem(f"{picture.stem}_by_position")
        draw_positions(rows, settings, picture, train_lens)


def is_asked(args: argparse.Namespace, name: str) -> bool:
    if name == "loss":
        return bool(args.all_tokens)
    return name == "same_targets" or args.bits or bool(args.files)


def name_models(runs: Sequence[Run], steps: Sequence[int]) -> list[str]:
    """Of each run the name of its lines. Runs of one name but for its _seed=N share theirs."""
    keys = [
        (run.title, run.folder.parent, re.sub(r"_seed=\d+", "", run.name), step)
        for run, step in zip(runs, steps, strict=True)
    ]
    names = []
    for run, key in zip(runs, keys, strict=True):
        name = run.title
        if len({each for each in keys if each[0] == run.title}) > 1:
            name += f" ({runs[keys.index(key)].source})"
        n_seeds = len({each.name for each, own in zip(runs, keys, strict=True) if own == key})
        names.append(f"{name}, {n_seeds} seeds" if n_seeds > 1 else name)
    return names


def read_lines(
    rows: DataFrame, settings: list[tuple[str, Setting]], name: str, lengths: list[int]
) -> list[Line]:
    """One for each model and setting that has losses. Of windows computed anew, which have them at
    the longest length, they are those of each length that is as long.
    """
    lines = []
    for model, setting in settings:
        own = measure.select(rows, model=model, measure=name, **setting.columns)
        source = {n: lengths[-1] if setting.anew and n >= setting.window else n for n in lengths}
        losses = {n: read_losses(own[own["length"] == source[n]]) for n in lengths}
        if any(losses.values()):
            lines.append(Line(model, setting, losses))
    return lines


def print_losses(lines: list[Line], what: str, text: str, do_compare: bool) -> None:
    """The losses; if they compare, the lowest and what each is above the first line's: the first
    run in its rolling window.
    """
    scored = [each for line in lines for each in line.losses.values() if each]
    n_documents = len({*scored[0].documents.tolist()})
    halves = [each.half for line in lines for each in line.estimates.values() if each]
    print(
        f"\nLoss in {what} of {len(scored[0].blocks)} blocks ({n_documents} documents);\n"
        f"text {text}; 95 % intervals ±{min(halves):.2g} to ±{max(halves):.2g}"
        f"{'; * lowest' if do_compare else ''}.\n"
    )
    lengths = [*lines[0].losses]
    least = {}
    for n in lengths:
        known = [each for line in lines if do_compare and (each := line.estimates[n])]
        least[n] = measure.format_loss(min(known)) if known else ""
    cells = [[loss_cell(line.estimates[n], least[n]) for n in lengths] for line in lines]
    print_lines(lines, cells)
    if not do_compare:
        return
    zero = lines[0]
    print(f"\nMinus {zero.model}, {zero.setting.label}, with the paired 95 % interval.\n")
    minus = [measure.subtract(line.losses, zero.losses).values() for line in lines]
    print_lines(lines, [[*map(format_difference, row)] for row in minus])


def loss_cell(each: Estimate | None, least: str) -> str:
    """All that are the least as printed are marked."""
    if each is None:
        return "-"
    text = measure.format_loss(each)
    return text + ("*" if text == least else " ")


def print_lines(lines: list[Line], cells: list[list[str]]) -> None:
    """Settings down, below the name of their model; lengths across."""
    table = [["context", *map(str, lines[0].losses)]]
    for i, line in enumerate(lines):
        if i == 0 or line.model != lines[i - 1].model:
            table.append([line.model])
        table.append([f"  {line.setting.label}", *cells[i]])
    print(measure.format_table(table))


def draw_losses(lines: list[Line], picture: Path, train_lens: Iterable[int], ylabel: str) -> None:
    """A curve for each model in its best setting at the longest length, and the first's window.

    Error bars are those of the differences to that window.
    """
    zero = lines[0]
    of_model: dict[str, Line] = {}
    for line in lines:
        best = of_model.get(line.model)
        if not line.setting.window and (best is None or last_loss(line) < last_loss(best)):
            of_model[line.model] = line
    curves = []
    for line in [*([zero] if zero.setting.window else []), *of_model.values()]:
        known = {length: each for length, each in line.estimates.items() if each}
        minus = measure.subtract(line.losses, zero.losses)
        halves = [each.half if (each := minus[length]) else math.nan for length in known]
        label = line.setting.label
        if not line.setting.anew:
            label = label.replace("window", "rolling window of")
        style = {"color": "0.3", "linestyle": "--", "marker": ""} if line.setting.window else {}
        values = [each.value for each in known.values()]
        curves.append(Curve(f"{line.model}, {label}", list(known), values, halves, style))
    title = "Held-out loss of the same targets"
    measure.draw_curves(picture, curves, title, ylabel, train_lens)


def print_keys(
    rows: DataFrame, settings: list[tuple[str, Setting]], args: argparse.Namespace
) -> None:
    """The key tokens of each model without a window, at the longest length: see `key_measure`."""
    length = args.lengths[-1]
    table = [["key tokens", "falls", "by", "rises", "by", "net"]]
    for model, setting in settings:
        own = measure.select(rows, model=model, length=length, **setting.columns)
        found = [
            read_losses(measure.select(own, measure=f"{key}>{args.key_tokens:g}")) for key in KEYS
        ]
        parts = [part for part in found if part is not None]
        if len(parts) < len(KEYS):
            continue
        means = [part.values.mean() for part in parts]
        net = parts[1]._replace(values=parts[1].values + parts[3].values)
        cells = []
        for share, by in (means[:2], means[2:]):
            cells += [f"{share:.1%}", f"{by / share:+.2f}" if share else "-"]
        label = f"{model}, {setting.label}"
        table.append([label, *cells, format_difference(measure.estimate(net))])
    print(
        f"\nTargets whose loss at {length} falls below that in the window by more than "
        f"{args.key_tokens:g} nats, and\nthose that rise so; net: what both add to the mean gain, "
        "with its 95 % interval.\n"
    )
    print(measure.format_table(table))


def last_loss(line: Line) -> float:
    """At the longest length that it has."""
    return [each.value for each in line.estimates.values() if each][-1]


def draw_positions(
    rows: DataFrame,
    settings: list[tuple[str, Setting]],
    picture: Path,
    train_lens: Iterable[int],
) -> None:
    """The loss by position in windows of the longest length (SSMax, Figure 5)."""
    rows = rows[rows["measure"].str.startswith("loss[")]
    curves = []
    for model, setting in settings:
        own = measure.select(rows, model=model, **setting.columns)
        means = own.groupby("measure", sort=False)["value"].mean()  # over seeds
        edges = [map(int, name[5:-1].split(":")) for name in means.index]
        middles = [sum(pair) / 2 for pair in edges]
        label = f"{model}, {setting.label}"
        curves.append(Curve(label, middles, means.tolist(), style={"marker": "", "linewidth": 1}))
    measure.draw_curves(
        picture, curves, "Held-out loss by position", "loss (nats)", train_lens,
        "position (tokens)",
    )  # fmt: skip


def command() -> None:
    """Of an installed package: length-eval."""
    run_main(main)


if __name__ == "__main__":
    command()
