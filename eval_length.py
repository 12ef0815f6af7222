"""The loss at 1x to 16x the training length, and with a rolling window of the training length.

    python eval_length.py runs/softmax runs/lssar                      # one table, one picture
    python eval_length.py runs/lssar/checkpoints/step_018865.pt --rope ntk theta=500000
    python eval_length.py runs/softmax runs/lssar --draw               # again, from the rows, at once
    torchrun --standalone --nproc_per_node=8 eval_length.py runs/lssar --tokens 10485760

Every length scores the same targets: the last tokens of each block, as many as the shortest length
has. What a length adds is context alone. A rolling window keeps the last T keys of each layer, as a
decoder with a KV cache of T does: what softmax has for nothing. Blocks stand at the ends of
documents, one each. With several runs the table has what each is above the first one in its rolling
window, with the paired 95 % interval; runs that differ in their seed alone are one line.

Writes rows.csv into the run folder (see measure.py), and the picture.
"""

import argparse
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas
import torch
from pandas import DataFrame
from torch import Tensor

import measure
from data.batches import read_targets
from evaluation import (
    FACTORS,
    Blocks,
    Run,
    add_arguments,
    open_blocks,
    open_runs,
    open_text,
    picture_path,
    score_all,
    text_of,
)
from infra.cli import ArgumentParser, UserError, integer, positive_int, run_main
from infra.distributed import World, join_world
from measure import Curve, Estimate, Losses, estimate, read_losses
from model import GPT
from positions import UNSCALED, RopeScaling

LOGITS_AT_ONCE = 1024  # positions whose logits exist together: 0.2 GB for GPT-2's vocabulary
# of windows computed anew: a target sees 7/8 of one on average; 8 would cost twice as much
STRIDES = 4
N_PARTS = 200  # of a window by position, as in SSMax's Figure 5


class Setting(NamedTuple):
    """How the model is given its context: a set of rows for each measure."""

    scaling: RopeScaling
    window: int = 0  # 0: none
    anew: bool = False  # windows computed anew, in place of a rolling one

    @property
    def columns(self) -> dict[str, str]:
        window = f"{self.window} recomputed" if self.anew else str(self.window)
        return {"window": window, "scaling": self.scaling.name}

    @property
    def label(self) -> str:
        if self.window:
            return f"window {self.window}" + (" anew" if self.anew else "")
        return {"none": "unscaled", "ntk": "NTK", "yarn": "YaRN"}.get(
            self.scaling.name, self.scaling.name
        )


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add_arguments(parser)
    add = parser.add_argument
    lengths_help = "(default: 1, 2, 4, 8, 16 x the training length)"
    add("--lengths", nargs="+", type=positive_int, metavar="T", help=lengths_help)
    rope_help = "RoPE scalings: none, ntk, yarn, theta=500000 (default: none ntk)"
    add("--rope", nargs="+", default=["none", "ntk"], metavar="SCALING", help=rope_help)
    window_help = "rolling windows, 0 for none (default: the training length)"
    number = integer(0, 10**12)
    add("--window", nargs="+", type=number, metavar="W", help=window_help)
    anew_help = "also windows that are computed anew for each target, positions from 0"
    add("--recomputed", action="store_true", help=anew_help)
    all_help = "also the loss over all tokens of the blocks, in windows of each length"
    add("--all-tokens", action="store_true", help=all_help)
    position_help = (
        f"also the loss by position in windows of the longest length, in {N_PARTS} parts"
    )
    add("--by-position", action="store_true", help=position_help)
    missing_help = "leave out runs whose rows are there, of all blocks, settings and lengths"
    add("--missing", action="store_true", help=missing_help)
    add("--draw", action="store_true", help="table and picture of the rows that are there")
    add(
        "--out", type=Path, metavar="FILE", help="picture (default: eval_length.png above the runs)"
    )
    args = parser.parse_args(argv)
    args.scalings = [RopeScaling(text) for text in dict.fromkeys(args.rope)]
    measure.check_figure(args.out)
    return args


def main() -> None:
    args = parse_args()
    if args.draw:
        runs = open_runs(args.runs)
        args.lengths = choose_lengths(args, runs)
        show(args, runs, [run.step for run in runs], None)
        return
    with join_world(args.device) as world:
        runs = open_runs(args.runs, world)
        args.lengths = choose_lengths(args, runs)
        streams = [open_text(run.config, args.data, run.tokenizer, args.split) for run in runs]
        blocks = [open_blocks(stream, args.lengths[-1], args.tokens) for stream in streams]
        text = text_of(streams[0])
        for run, stream in zip(runs, streams, strict=True):
            if text_of(stream) != text:
                has = f"{streams[0].folder} of {runs[0].source}"
                raise UserError(f"{run.source}: {stream.folder} is another text than {has}: --data")
        steps = []
        for run, of_run in zip(runs, blocks, strict=True):
            if args.missing and all(world.gather_objects(is_whole(run, of_run, args))):
                steps.append(run.step)
                continue
            model, step = run.load(world)
            rows = measure_run(world, run, model, step, of_run, args)
            if world.is_main:
                measure.write_rows(run.folder, rows)
            steps.append(step)
        if world.is_main:
            show(args, runs, steps, text)


def is_measured(argv: Sequence[str]) -> bool:
    """Whether the rows that a call with these arguments would write are there."""
    args = parse_args(argv)
    runs = open_runs(args.runs)
    args.lengths = choose_lengths(args, runs)
    for run in runs:
        stream = open_text(run.config, args.data, run.tokenizer, args.split)
        if not is_whole(run, open_blocks(stream, args.lengths[-1], args.tokens), args):
            return False
    return True


def is_whole(run: Run, blocks: Blocks, args: argparse.Namespace) -> bool:
    """Whether each set of the run's step has all blocks at all lengths."""
    rows = measure.read_rows(run.folder)
    rows = measure.select(rows, run=run.name, step=run.step, text=text_of(blocks.stream))
    names = ["same_targets", *(["loss"] if args.all_tokens else [])]
    for setting in settings_of(args, run):
        of_setting = measure.select(rows, **setting.columns)
        lengths = [blocks.length] if setting.anew else args.lengths
        for name in names if not setting.anew else names[:1]:
            known = measure.select(of_setting, measure=name)
            if measure.count_blocks(known, lengths) != len(blocks):
                return False
        by_position = of_setting["measure"].str.startswith("loss[").any()
        if args.by_position and not by_position:
            return False
    return True


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
    """A rolling window has no scaling: no distance in it is longer than in training."""
    asked = [run.train_len] if args.window is None else args.window
    windows = [Setting(UNSCALED, window) for window in dict.fromkeys(asked) if window]
    anew = [each._replace(anew=True) for each in windows] if args.recomputed else []
    return [*windows, *anew, *(Setting(scaling) for scaling in run.scalings(args.scalings))]


# ---------------------------------------------------------------- scores
def measure_run(
    world: World, run: Run, model: GPT, step: int, blocks: Blocks, args: argparse.Namespace
) -> list[tuple[Any, ...]]:
    """The rows of a run: whole sets."""
    rows: list[tuple[Any, ...]] = []
    n_same = args.lengths[0]
    for setting in settings_of(args, run):
        is_rolling = setting.window > 0 and not setting.anew
        windowed = model.with_window(setting.window) if is_rolling else model
        for length in [blocks.length] if setting.anew else args.lengths:
            is_longest = length == blocks.length
            edges = part_edges(length) if args.by_position and is_longest else []
            # one that reaches all keys has no effect
            of_length = windowed if length > setting.window else model
            losses = partial(
                block_losses, of_length, blocks, length, setting, n_same, args.all_tokens
            )
            label = f"{run.title}, {setting.label}, {length} tokens"
            summed = partial(summarise, losses=losses, n_same=n_same, edges=edges)
            scores = score_all(world, label, len(blocks), summed)
            if isinstance(scores, str) and world.is_main:
                print(f"{run.title}, {setting.label}, at {length}: no result: {scores}")
            key = (run.name, step, text_of(blocks.stream))
            context = (length, *setting.columns.values())
            for cell in cells(scores, blocks, args.all_tokens and not setting.anew, edges):
                name, block, document, value = cell
                rows.append((*key, name, *context, block, document, value))
    return rows


def block_losses(
    model: GPT,
    blocks: Blocks,
    length: int,
    setting: Setting,
    n_same: int,
    all_tokens: bool,
    block: int,
) -> Tensor:
    """The losses of one block in windows of `length` tokens, (W, length) float32 on the device.

    Without `all_tokens` there is one window, the last of the block. Of windows computed anew the
    losses are those of the block's last n_same tokens, (1, n_same).
    """
    device = model.embedding.weight.device
    targets = read_targets(blocks.stream, blocks.starts[block], blocks.length)
    x, y = (torch.from_numpy(each).to(device) for each in targets)  # (longest,)
    with model.autocast():
        if setting.anew:
            return recomputed_losses(model, x, y, setting.window, n_same)[None]
        n = blocks.length // length if all_tokens else 1
        x = x[-n * length :].view(n, length)
        y = y[-n * length :].view(n, length)
        return model.token_losses(x, y, rope=setting.scaling, chunk=max(1, LOGITS_AT_ONCE // n))


def recomputed_losses(model: GPT, x: Tensor, y: Tensor, context: int, n_same: int) -> Tensor:
    """The losses of the last n_same of (longest,) tokens, each with at most `context` before it.

    A window moves by a quarter of its tokens and scores those that it reaches, which so see at
    least three quarters of it (Press et al. 2021, arXiv 2012.15832, section 2; "Perplexity of
    fixed-length models" in the documentation of transformers).
    """
    longest = len(x)
    if context >= longest:
        return model.token_losses(x[None], y[None, -n_same:], chunk=LOGITS_AT_ONCE)[0]
    stride = math.ceil(context / STRIDES)
    # the last window ends with the block; the first scores the first of the targets
    n_windows = min(math.ceil(n_same / stride), 1 + (longest - context) // stride)
    last = longest - context
    starts = torch.arange(last - stride * (n_windows - 1), last + 1, stride, device=x.device)
    at_once = max(1, longest // context)  # as many tokens as a pass over the block
    losses = []
    for some in starts.split(at_once):
        positions = some[:, None] + torch.arange(context, device=x.device)  # (n, context)
        chunk = max(1, LOGITS_AT_ONCE // len(some))
        of_windows = model.token_losses(x[positions], y[positions[:, -stride:]], chunk=chunk)
        losses.append(of_windows.flatten())
    scored = torch.cat(losses)
    if len(scored) < n_same:  # the targets begin in the block's first window
        first = slice(0, int(starts[0]) + context - stride)
        before = model.token_losses(x[None, first], y[None, first], chunk=LOGITS_AT_ONCE)[0]
        scored = torch.cat([before, scored])
    return scored[-n_same:]


def summarise(items: Sequence[int], losses: Any, n_same: int, edges: list[int]) -> Tensor:
    """Of one block: the mean of its same targets, of all its tokens, of each part of a window."""
    (block,) = items
    of_block = losses(block).double()  # (W, length)
    by_part = [of_block[:, i:j].mean() for i, j in itertools.pairwise(edges)]
    return torch.stack([of_block[-1, -n_same:].mean(), of_block.mean(), *by_part])[None]


def part_edges(length: int) -> list[int]:
    """Of at most N_PARTS parts of one width, the first token of each and the end."""
    n_parts = min(N_PARTS, length)
    return [i * length // n_parts for i in range(n_parts + 1)]


def cells(
    scores: Tensor | str, blocks: Blocks, all_tokens: bool, edges: list[int]
) -> Iterator[tuple[str, int | None, int | None, float | None]]:
    """Measure, block, document and value of the rows; no values where there are no scores."""
    names = ["same_targets", *(["loss"] if all_tokens else [])]
    for column, name in enumerate(names):
        for block, document in enumerate(blocks.documents):
            value = None if isinstance(scores, str) else scores[block, column].item()
            yield name, block, document, value
    for part, (start, stop) in enumerate(itertools.pairwise(edges)):
        value = None if isinstance(scores, str) else scores[:, 2 + part].mean().item()
        yield f"loss[{start}:{stop}]", None, None, value


# ---------------------------------------------------------------- views
class Line(NamedTuple):
    """A model in one setting: a line of the table, a curve of the picture."""

    model: str
    setting: str
    is_rolling: bool
    losses: dict[int, Losses | None]  # by length


def show(args: argparse.Namespace, runs: Sequence[Run], steps: list[int], text: str | None) -> None:
    """Print the table and draw the picture of rows. text: None is that of the newest rows."""
    tables = []
    for run, step in zip(runs, steps, strict=True):
        rows = measure.select(measure.read_rows(run.folder), run=run.name, step=step)
        if not (rows["measure"] == "same_targets").any():
            raise UserError(f"{run.folder}: no rows of step {step}: expected a call without --draw")
        tables.append(rows)
    text = text or tables[0]["text"][tables[0]["measure"] == "same_targets"].iloc[-1]
    tables = [measure.select(rows, text=text) for rows in tables]
    models = group_seeds(runs)
    for name in differences_in_size(runs):
        print(name)
    print_losses(args, runs, tables, models, "same_targets", text)
    if args.all_tokens:
        print_losses(args, runs, tables, models, "loss", text)
    if args.by_position:
        draw_positions(args, runs, tables, models)


def group_seeds(runs: Sequence[Run]) -> dict[str, list[int]]:
    """The numbers of the runs of each model, by its name: those that differ in their seed alone.

    Models of one name are told apart by the names of their runs.
    """
    groups: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        values = run.config.model_dump(exclude={"name", "seed", "log", "data"})
        groups.setdefault(json.dumps(values, sort_keys=True), []).append(i)
    titles = [runs[numbers[0]].title for numbers in groups.values()]
    named = {}
    for title, numbers in zip(titles, groups.values(), strict=True):
        name = title if titles.count(title) == 1 else f"{title} ({runs[numbers[0]].name})"
        if name in named:  # as of two checkpoints of a run
            name += f" {runs[numbers[0]].source.stem}"
        n = len(numbers)
        named[f"{name}, {n} seeds" if n > 1 else name] = numbers
    return named


def differences_in_size(runs: Sequence[Run]) -> Iterator[str]:
    """A line for each of steps, batch and width in which the runs differ."""
    for section, key in (
        ("train", "max_steps"), ("train", "batch_tokens"), ("train", "seq_len"),
        ("model", "n_layer"), ("model", "n_embd"),
    ):  # fmt: skip
        values = [(run.name, getattr(getattr(run.config, section), key)) for run in runs]
        if len({value for _, value in values}) > 1:
            listed = ", ".join(f"{name} {value}" for name, value in values)
            yield f"the runs differ in {section}.{key}: {listed}"


def read_lines(
    args: argparse.Namespace,
    runs: Sequence[Run],
    tables: list[DataFrame],
    models: dict[str, list[int]],
    name: str,
) -> list[Line]:
    lines = []
    for model, numbers in models.items():
        for setting in settings_of(args, runs[numbers[0]]):
            rows = [measure.select(tables[i], measure=name, **setting.columns) for i in numbers]
            # two checkpoints of one run are not one
            seeds = [each.assign(run=str(i)) for i, each in zip(numbers, rows, strict=True)]
            losses = {}
            for length in args.lengths:
                of_length = [measure.select(each, length=length) for each in seeds]
                losses[length] = read_losses(pandas.concat(of_length))
            if any(losses.values()):
                is_rolling = setting.window > 0 and not setting.anew
                lines.append(Line(model, setting.label, is_rolling, losses))
    return lines


def print_losses(
    args: argparse.Namespace,
    runs: Sequence[Run],
    tables: list[DataFrame],
    models: dict[str, list[int]],
    name: str,
    text: str,
) -> None:
    """The losses, and what each is above the first run's in its rolling window."""
    lines = read_lines(args, runs, tables, models, name)
    if not lines:
        return
    known = next(each for line in lines for each in line.losses.values() if each)
    n_documents = len({document for _, document in known.blocks})
    n_same = min(tables[0]["length"][tables[0]["measure"] == "same_targets"])
    what = f"the last {n_same} tokens" if name == "same_targets" else "all tokens"
    estimates = [
        {length: estimate(losses) if losses else None for length, losses in line.losses.items()}
        for line in lines
    ]
    halves = [each.half for of_line in estimates for each in of_line.values() if each]
    print(
        f"\nLoss in nats of {what} of {len(known.blocks)} blocks ({n_documents} documents);\n"
        f"text {text}; 95 % intervals ±{min(halves):.2g} to ±{max(halves):.2g}; * lowest.\n"
    )
    print_lines(args, lines, estimates)
    zero = reference(lines)
    minus = [measure.subtract(line.losses, zero.losses) for line in lines]
    print(f"\nMinus {zero.model}, {zero.setting}, with the paired 95 % interval.\n")
    print_lines(args, lines, minus, are_differences=True)
    if name == "same_targets":
        draw_losses(args, runs, lines, estimates, minus)


def reference(lines: list[Line]) -> Line:
    """The first model in its rolling window, else in its first setting."""
    of_first = [line for line in lines if line.model == lines[0].model]
    return next((line for line in of_first if line.is_rolling), of_first[0])


def print_lines(
    args: argparse.Namespace,
    lines: list[Line],
    estimates: list[dict[int, Estimate | None]],
    are_differences: bool = False,
) -> None:
    """Settings down, below the name of their model; lengths across, as many as fit."""
    best = measure.mark_best([[each[length] for each in estimates] for length in args.lengths])
    marks = dict(zip(args.lengths, best, strict=True))

    def cell(i: int, length: int) -> str:
        each = estimates[i][length]
        if each is None:
            return "-"
        if are_differences:
            return measure.format_difference(each)
        return measure.format_estimate(each, with_half=False) + ("*" if i in marks[length] else " ")

    cells = [["context", *map(str, args.lengths)]]
    for i, line in enumerate(lines):
        if i == 0 or line.model != lines[i - 1].model:
            cells.append([line.model])
        cells.append([f"  {line.setting}", *(cell(i, length) for length in args.lengths)])
    print(measure.format_table(cells))


def draw_losses(
    args: argparse.Namespace,
    runs: Sequence[Run],
    lines: list[Line],
    estimates: list[dict[int, Estimate | None]],
    minus: list[dict[int, Estimate | None]],
) -> None:
    """A curve for each model in its best setting at the longest length, and the first's window.

    Error bars are those of the differences to that window.
    """
    zero = lines.index(reference(lines))
    shown: dict[str, tuple[float, int]] = {}  # by model, its loss and line
    for i, line in enumerate(lines):
        if not line.is_rolling:
            longest = [each for each in estimates[i].values() if each][-1:]
            loss = longest[0].value if longest else math.inf
            if line.model not in shown or loss < shown[line.model][0]:
                shown[line.model] = (loss, i)
    numbers = [i for _, i in shown.values()]
    if lines[zero].is_rolling:
        numbers.insert(0, zero)
    curves = []
    for i in numbers:
        known = {length: each for length, each in estimates[i].items() if each}
        halves = [each.half if (each := minus[i][length]) else math.nan for length in known]
        style = {"color": "0.3", "linestyle": "--", "marker": ""} if lines[i].is_rolling else {}
        setting = lines[i].setting.replace("window", "rolling window of")
        label = f"{lines[i].model}, {setting}"
        values = [each.value for each in known.values()]
        curves.append(Curve(label, list(known), values, halves, style))
    path = args.out or picture_path(runs, "eval_length")
    train_lens = {run.train_len for run in runs}
    title = "Held-out loss of the same targets"
    measure.draw_curves(path, curves, title, "loss (nats)", train_lens)


def draw_positions(
    args: argparse.Namespace,
    runs: Sequence[Run],
    tables: list[DataFrame],
    models: dict[str, list[int]],
) -> None:
    """The loss by position in windows of the longest length, of each model and setting (SSMax,
    Figure 5).
    """
    curves = []
    for model, numbers in models.items():
        for setting in settings_of(args, runs[numbers[0]]):
            rows = measure.select(tables[numbers[0]], length=args.lengths[-1], **setting.columns)
            parts = rows[rows["measure"].str.startswith("loss[")]
            edges = parts["measure"].str.extract(r"\[(\d+):(\d+)\]").astype(int)
            middles = ((edges[0] + edges[1]) / 2).tolist()
            label = f"{model}, {setting.label}"
            curves.append(Curve(label, middles, parts["value"].tolist(), style={"marker": ""}))
    picture = args.out or picture_path(runs, "eval_length")
    measure.draw_curves(
        picture.with_stem(f"{picture.stem}_by_position"), curves, "Held-out loss by position",
        "loss (nats)", {run.train_len for run in runs}, "position (tokens)",
    )  # fmt: skip


if __name__ == "__main__":
    run_main(main)
