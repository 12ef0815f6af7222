"""Train an attention of one's own in the track's recipe, and print its row beside the board.

    python compare.py mine.toml                              # one seed of a file with an [attention]
    python compare.py mine.toml --seed 1 2 3 --jobs 2        # three seeds, two at a time
    python compare.py mine.toml --quick 100                  # 100 steps beside softmax's: to try it
    python compare.py --check results mine.toml              # is the row of mine.toml in results true?

A file states what the attention is; all else is configs/track.toml's. The rules, which are checked
before the training:

    parameters     at most 1.02 times softmax's
    at inference   keys and values alone are kept; no row looks at later keys
    fixed          text, tokens, steps, batch, optimiser, width, MLP, norms, type
    free           [attention], [[layers]], positions, windows, gate, shifted keys, the peak rate

Rates, RoPE scalings and windows are chosen on the val split, and the test split is reported. The
first number is the loss within T minus softmax's; the others are the losses at 4 T and 16 T minus
those of softmax in a rolling window of T, on the same targets. ± is the 95 % interval; p, of the
last number, is Holm's over the board. The same command resumes. Rows stay in the runs' folders:
`python measure.py runs/track/mine* --out results` enters them.
"""

import argparse
import math
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pandas
import torch
from pandas import DataFrame

import eval_length
import measure
import sweep
from config import changed_keys, load_config
from data.dataset import TokenStream
from data.packages import PUBLISHED
from evaluation import open_text, text_of
from infra.cli import ArgumentParser, UserError, positive_int, run_main
from infra.distributed import StopSignals
from infra.files import read_text
from measure import Curve, Estimate, Losses, estimate, format_difference, holm, read_losses, select
from model import GPT, KVCache
from positions import UNSCALED
from schema import VARIANT_KEYS, Config

HERE = Path(__file__).resolve().parent
TRACK = HERE / "configs/track.toml"
SOFTMAX = HERE / "configs/softmax.toml"
RESULTS = HERE / "results"
FREE_KEYS = (*VARIANT_KEYS, "name", "seed", "log.", "data.dir", "optimizer.lr", "optimizer.muon_lr")
MOST_PARAMETERS = 1.02  # times softmax's
MOST_KEPT = 1.02  # numbers of a position in the cache, times those of keys and values
FACTORS = (1, 4, 16)  # times T: the numbers of a row
NAME_WIDTH = 20  # of a variant in the tables
TOLERANCE = 0.005  # nats that a training may move on another machine


def parse_args(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our options, and overrides for all runs."""
    parser = ArgumentParser(__doc__)
    parser.usage = "compare.py CONFIG.toml [CONFIG.toml ...] [options] [--section.key VALUE ...]"
    add = parser.add_argument
    quick_help = "train N steps, beside softmax: not comparable with the board"
    add("--quick", type=positive_int, metavar="N", help=quick_help)
    check_help = "train seed 1 again, and compare it with its row in a folder like results/"
    add("--check", nargs="+", metavar=("ROWS", "CONFIG"), help=check_help)
    add("--base", type=Path, default=TRACK, metavar="FILE", help="recipe (default: the track's)")
    add("--board", type=Path, default=RESULTS, metavar="DIR", help="(default: results)")
    add("--jobs", type=positive_int, default=1, metavar="J", help="runs at once (default: 1)")
    tokens_help = "of each evaluation (default: %(default)s)"
    add("--eval-tokens", type=positive_int, default=2**20, metavar="N", help=tokens_help)
    n_configs = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    args, overrides = parser.parse_known_args(argv[n_configs:])
    args.configs = argv[:n_configs] + (args.check[1:] if args.check else [])
    args.nproc = None
    if not args.configs:
        raise UserError("expected config files first: compare.py mine.toml (or --help)")
    if args.check and args.quick:
        raise UserError("--check trains all steps: expected no --quick")
    return args, overrides


def main() -> None:
    args, overrides = parse_args(sys.argv[1:])
    configs = list(args.configs)
    folder = "runs/track"
    if args.quick:
        folder = f"runs/quick_{args.quick}"
        warmup = min(args.quick, load_config(args.base).optimizer.warmup_steps)
        overrides = [*overrides, "--train.max-steps", str(args.quick)]
        overrides += ["--optimizer.warmup-steps", str(warmup)]
        configs = list(dict.fromkeys([str(SOFTMAX), *configs]))
        print(f"NOT COMPARABLE with the board: {args.quick} steps (--quick)")
    elif args.check:
        folder = "runs/check"
        overrides = [*overrides, "--seed", "1"]
    if not any(word.startswith("--log.dir") for word in overrides):
        overrides = [*overrides, "--log.dir", folder]
    for path in configs:
        say_base(Path(path), args.base)
    jobs = sweep.make_jobs(configs, [*overrides, "--base", str(args.base)], None)
    recipe = load_config(args.base)
    for job in jobs:
        check_rules(job.config, recipe, is_quick=bool(args.quick))
        stored = job.run_dir / "config.toml"
        before = load_config(stored).normalisers if stored.exists() else []
        if changed := {*before} - {*job.config.normalisers}:
            problem = f"{job.run_dir}: was trained with other code, {', '.join(sorted(changed))}"
            raise UserError(f"{problem}: remove it, or choose another --log.dir")
    train_and_evaluate(jobs, args)
    runs, rows = read_runs([job.run_dir for job in jobs])
    if args.check:
        check_row(Path(args.check[0]), runs, rows)
        return
    if not args.quick:
        runs, rows = with_board(args.board, runs, rows)
    title = "NOT COMPARABLE: " + f"{args.quick} steps" if args.quick else "The board"
    config = jobs[0].config
    reported, chosen_on = (text_of(open_text(config, None, split=split)) for split in (None, "val"))
    if reported == chosen_on:
        print("this dataset has no test split: rates and scalings are chosen on what is reported")
    lines = board_lines(runs, rows, reported, chosen_on)
    print_board(lines, title)
    draw(lines, title, jobs[0].run_dir.parent / "compare.png")


# ---------------------------------------------------------------- rules
def say_base(path: Path, base: Path) -> None:
    """Print whose keys outside attention no longer hold."""
    own_base = tomllib.loads(read_text(path)).get("base")
    if own_base:
        print(f"{path}: {base.name} takes the place of its base {own_base}")


def check_rules(config: Config, recipe: Config, is_quick: bool = False) -> None:
    """Raises UserError: a rule of the track is broken (see the top of this file)."""
    free = FREE_KEYS + (("train.max_steps", "optimizer.warmup_steps") if is_quick else ())
    for key, (ours, theirs) in changed_keys(recipe, config).items():
        if not key.startswith(free):
            raise UserError(f"{config.name}: {key} = {theirs!r}: expected {ours!r}, the track's")
    check_text(config, recipe)
    n_softmax = count_parameters(recipe)
    n_params = count_parameters(config)
    if n_params > MOST_PARAMETERS * n_softmax:
        most = int(MOST_PARAMETERS * n_softmax)
        raise UserError(f"{config.name}: {n_params:,} parameters: expected at most {most:,}")
    model = GPT(config).eval()
    check_causal(config.name, model)
    check_cache(config.name, model)


def check_text(config: Config, recipe: Config) -> None:
    """Raises UserError: another text than the recipe's, which is published for the track."""
    expected = {split: f"sha256 {sha256}" for split, sha256 in PUBLISHED.items()}
    if recipe.data.dir != load_config(TRACK).data.dir:
        expected = {
            split: TokenStream(recipe.data.dir, split).fingerprint for split in ("train", "val")
        }
    for split, fingerprint in expected.items():
        stream = TokenStream(config.data.dir, split)
        if stream.fingerprint != fingerprint:
            problem = f"{config.data.dir}: {split} has {stream.fingerprint}"
            raise UserError(f"{problem}: expected {fingerprint}, the recipe's text")


def count_parameters(config: Config) -> int:
    with torch.device("meta"):
        return GPT(config).n_params()


@torch.no_grad()
def check_causal(name: str, model: GPT) -> None:
    """Raises UserError: what follows a token changes its output."""
    length = min(64, model.config.train.seq_len)  # ssmax_pn is of no greater one
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.model.vocab_size, (1, length), generator=drawn)
    other = tokens.clone()
    half = length // 2
    other[:, half:] = torch.flip(tokens[:, half:], (1,))
    before, after = (model.hidden(each, UNSCALED)[:, :half] for each in (tokens, other))
    if (before - after).abs().max() > 1e-3 * before.abs().max():
        raise UserError(f"{name}: a row looks at later keys: expected causal attention")


@torch.no_grad()
def check_cache(name: str, model: GPT) -> None:
    """Raises UserError: more than keys and values are kept of a position, or it cannot be cached."""
    if not model.cacheable:
        raise UserError(f"{name}: a position's output is never final: expected what can be cached")
    config = model.config.model
    cache = KVCache(config.n_layer, 8)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    model.hidden(tokens, UNSCALED, cache)
    kept = sum(part[0, :, 0].numel() for held in cache.held for part in held)
    keys_and_values = 2 * config.n_layer * config.kv_heads * config.head_dim
    if kept > MOST_KEPT * keys_and_values:
        expected = f"expected {keys_and_values}, keys and values alone"
        raise UserError(f"{name}: {kept} numbers of a position are kept at inference: {expected}")


# ---------------------------------------------------------------- work
def train_and_evaluate(jobs: list[sweep.Job], args: argparse.Namespace) -> None:
    """By sweep.py, then on the val split, on which choices are made. Ends the process on failure."""
    failures = sweep.run_all(jobs, args)
    if failures:
        raise UserError("\n".join(failures))
    if failures is None:
        sys.exit(1)
    with StopSignals() as stop:
        for job in jobs:
            arguments = [*job.evaluation(args.eval_tokens), "--split", "val"]
            if not eval_length.is_measured(arguments):
                script = str(HERE / "eval_length.py")
                status = sweep.run([sys.executable, script, *arguments], stop, None, None)
                if status or stop.number:
                    sys.exit(status or 128 + stop.number)


def read_runs(folders: Sequence[Path]) -> tuple[DataFrame, DataFrame]:
    """The two tables of run folders (see measure.py)."""
    described = [measure.describe_run(folder) for folder in folders]
    runs = DataFrame(described, columns=measure.RUN_COLUMNS).astype(str)
    return runs, measure.read_rows(*folders)


def with_board(board: Path, runs: DataFrame, rows: DataFrame) -> tuple[DataFrame, DataFrame]:
    """With the board's runs of the same recipe and text. The own ones take the place of older."""
    theirs = measure.read_runs(board)
    first = runs.iloc[0]
    for key in ("T", "steps"):
        theirs = theirs[theirs[key] == first[key]]
    theirs = theirs[~theirs["run"].isin(runs["run"])]
    their_rows = measure.read_rows(board / "rows.csv.gz")
    their_rows = their_rows[their_rows["run"].isin(theirs["run"])]
    their_rows = their_rows[their_rows["text"].isin(rows["text"].unique())]
    theirs = theirs[theirs["run"].isin(their_rows["run"])]
    return pandas.concat([theirs, runs]), pandas.concat([their_rows, rows])


# ---------------------------------------------------------------- the board
class Row(NamedTuple):
    """A variant at the rate and in the setting that the val split chose."""

    name: str
    runs: DataFrame  # its seeds at that rate
    n_rates: int
    setting: str
    losses: dict[int, Losses | None]  # by factor of T, on the reported text
    minus: dict[int, Estimate | None]  # within T over softmax's, beyond over its rolling window


def board_lines(runs: DataFrame, rows: DataFrame, reported: str, chosen_on: str) -> list[Row]:
    """The rows of all variants, the best at 16 T first. reported, chosen_on: texts."""
    rows = select(rows, measure="same_targets")
    train_len = int(runs["T"].iloc[0])
    lines = []
    zero: dict[int, Losses | None] = {}
    for variant, own_runs in runs.groupby("variant", sort=False):
        by_rate = {
            str(rate): setting_of(rows, own["run"].tolist(), chosen_on, train_len)
            for rate, own in own_runs.groupby("rate", sort=False)
        }
        rate = min(by_rate, key=lambda each: by_rate[each][0])
        _, window, scaling = by_rate[rate]
        best = own_runs[own_runs["rate"] == rate]
        names = best["run"].tolist()
        losses, in_window = (
            {
                factor: losses_of(rows, names, reported, factor * train_len, *setting)
                for factor in FACTORS
            }
            for setting in ((window, scaling), (str(train_len), "none"))
        )
        if variant == "softmax":
            zero = in_window
        setting = "window" if window != "0" else scaling.replace("none", "unscaled")
        lines.append(Row(str(variant), best, len(by_rate), setting, losses, {}))
    compared = [line._replace(minus=measure.subtract(line.losses, zero)) for line in lines]
    return sorted(compared, key=lambda line: mean_at(line, FACTORS[-1]))


def setting_of(
    rows: DataFrame, names: Sequence[str], text: str, train_len: int
) -> tuple[float, str, str]:
    """The least mean loss at 16 T on a text, and the window and scaling that it has."""
    longest = select(rows, text=text, length=FACTORS[-1] * train_len)
    longest = longest[longest["run"].isin(names)]
    means = longest.groupby(["window", "scaling"], sort=False)["value"].mean().dropna()
    if means.empty:
        return math.inf, "0", "none"
    window, scaling = means.idxmin()
    return float(means.min()), str(window), str(scaling)


def losses_of(
    rows: DataFrame, names: Sequence[str], text: str, length: int, window: str, scaling: str
) -> Losses | None:
    own_rows = select(rows, text=text, length=length, window=window, scaling=scaling)
    return read_losses(own_rows[own_rows["run"].isin(names)])


def mean_at(line: Row, factor: int) -> float:
    losses = line.losses[factor]
    return float(losses.values.mean()) if losses else math.inf


def print_board(lines: list[Row], title: str) -> None:
    """The differences, then the losses and what they cost; 80 columns each."""
    longest = FACTORS[-1]
    tested = {line.name: line.minus[longest] for line in lines}
    known = {name: each.p for name, each in tested.items() if each and each.half > 0}
    p = dict(zip(known, holm([*known.values()]), strict=True))
    names = sweep.short_names([line.name for line in lines], NAME_WIDTH)
    differences = [["variant", "context", "n", "T", "4 T", "16 T", "p"]]
    losses = [["variant", "T", "4 T", "16 T", "parameters", "minutes", "rates"]]
    for line, name in zip(lines, names, strict=True):
        cells = [format_difference(each) if each else "-" for each in line.minus.values()]
        own_p = f"{p[line.name]:.3f}" if line.name in p else "-"
        differences.append([name, line.setting, str(len(line.runs)), *cells, own_p])
        means = [f"{mean_at(line, factor):.3f}" for factor in FACTORS]
        minutes = line.runs["minutes"].replace("", "nan").astype(float).mean()
        costs = [str(line.runs["parameters"].iloc[0]), f"{minutes:.1f}", str(line.n_rates)]
        losses.append([name, *means, *costs])
    print(
        f"\n{title}\n\nLoss within T minus softmax's, at 4 T and 16 T minus softmax's in its rolling"
    )
    print("window of T. ± is the 95 % interval, for n = 1 of documents; p is Holm's.\n")
    print(measure.format_table(differences, n_names=2))
    print("\nLosses in nats, and what a run costs.\n")
    print(measure.format_table(losses))
    if not any(line.name == "softmax" for line in lines):
        print("\nno softmax of this recipe to compare with: python compare.py configs/softmax.toml")


def draw(lines: list[Row], title: str, path: Path) -> None:
    curves = []
    for line in lines:
        known = {factor: losses for factor, losses in line.losses.items() if losses}
        values = [float(losses.values.mean()) for losses in known.values()]
        halves = [each.half if (each := line.minus[factor]) else math.nan for factor in known]
        curves.append(Curve(f"{line.name}, {line.setting}", list(known), values, halves))
    xlabel = "context, times the training length"
    measure.draw_curves(path, curves, title, "loss (nats)", [], xlabel)


# ---------------------------------------------------------------- check
def check_row(folder: Path, runs: DataFrame, rows: DataFrame) -> None:
    """Compare a training of seed 1 with the board's row of the same run.

    Raises UserError: there is none, its own file's sha256 differs, or a loss differs by more than
    the interval of the difference over documents, and than TOLERANCE.
    """
    board = measure.read_runs(folder)
    stored = measure.read_rows(folder / "rows.csv.gz")
    for _, run in runs.iterrows():
        is_own = (board["variant"] == run["variant"]) & (board["seed"] == "1")
        theirs = board[is_own & (board["rate"] == run["rate"])]
        if theirs.empty:
            raise UserError(f"{folder}: no run of {run['variant']} with seed 1, rate {run['rate']}")
        old = theirs.iloc[0]
        if old["sha256"] != run["sha256"]:
            problem = f"its file has sha256 {run['sha256'] or 'none'}"
            raise UserError(
                f"{run['run']}: {problem}: expected {old['sha256'] or 'none'}, the row's"
            )
        compare_rows(str(run["run"]), select(rows, run=run["run"]), select(stored, run=old["run"]))
        print(f"{run['run']}: the row holds")


def compare_rows(name: str, ours: DataFrame, theirs: DataFrame) -> None:
    keys = ["text", "measure", "length", "window", "scaling"]
    n_compared = 0
    for key, own_rows in select(ours, measure="same_targets").groupby(keys, sort=False):
        where = dict(zip(keys, key, strict=True))
        new = read_losses(own_rows.assign(run="seed"))
        old = read_losses(select(theirs, **where).assign(run="seed"))
        if new is None or old is None:
            continue
        difference = estimate(old, new)
        n_compared += 1
        if abs(difference.value) > max(TOLERANCE, difference.half):
            at = ", ".join(f"{column} {value}" for column, value in where.items())
            expected = f"expected {new.values.mean():.4f} ±{max(TOLERANCE, difference.half):.4f}"
            raise UserError(f"{name}: the row has {old.values.mean():.4f} at {at}: {expected}")
    if not n_compared:
        raise UserError(f"{name}: the row has no losses on this text")


if __name__ == "__main__":
    run_main(main)
