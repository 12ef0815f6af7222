"""Train an attention of one's own in the track's recipe, and print its row beside the board.

    python compare.py mine.toml                        # one seed of a file with an [attention]
    python compare.py mine.toml --seed 1 2 3 --jobs 2  # three seeds, two at a time
    python compare.py mine.toml --quick 100            # 100 steps beside softmax's: to try it
    python compare.py --check results mine.toml        # is the row of mine.toml in results true?

A file states what the attention is; all else is configs/track.toml's. The rules, which are checked
before the training:

    parameters     at most 1.02 times softmax's
    at inference   keys and values alone are kept; no row looks at later keys
    fixed          text, tokens, steps, batch, optimiser, width, MLP, norms, type
    free           [attention], [[layers]], positions, windows, shifted keys, the peak rate

Rates, RoPE scalings and windows are chosen on the val split, and the test split is reported. The
first number is the loss within T minus softmax's; the others are the losses at 4 T and 16 T minus
those of softmax in a rolling window of T, on the same targets. ± is the 95 % interval; p, of the
last number, is Holm's over the board's entries of two seeds or more. The same command resumes. Rows
stay in the runs' folders: `python measure.py runs/track/mine* --out results` enters them.
"""

import infra.packages  # noqa: F401

import argparse
import copy
import math
import sys
from pathlib import Path
from typing import NamedTuple

import pandas
import torch
from pandas import DataFrame

import measure
import sweep
from config import changed_keys, load_config, read_toml
from data.dataset import TokenStream
from data.packages import PUBLISHED
from evaluation import open_text, text_of
from infra.cli import ArgumentParser, UserError, positive_int, run_main
from measure import Curve, Estimate, Losses, estimate, format_difference, holm, read_losses, select
from model import GPT, KVCache
from positions import UNSCALED
from schema import VARIANT_KEYS, Config
from training.checkpoint import load_model

HERE = Path(__file__).resolve().parent
TRACK = HERE / "configs/track.toml"
SOFTMAX = HERE / "configs/softmax.toml"
RESULTS = HERE / "results"
ROWS = "rows.csv.gz"  # in a folder like results
FREE_KEYS = (*VARIANT_KEYS, "name", "seed", "log.", "data.dir", "optimizer.lr", "optimizer.muon_lr")
QUICK_KEYS = ("train.max_steps", "optimizer.warmup_steps")  # free, too, with --quick
MOST_PARAMETERS = 1.02  # times softmax's
MOST_KEPT = 1.02  # numbers of a position in the cache, times those of keys and values
FACTORS = (1, 4, 16)  # times T: the numbers of a row
TOLERANCE = 0.005  # nats that a training may move on another machine
MOST_TOLERANCE = 0.02  # with what a row's blocks vary, of which a row must not have its fill
CHECKED_TOKENS = 1024  # at most, for look-ahead; 4 T if that is less


def parse_args(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our options, and overrides for all runs."""
    parser = ArgumentParser(__doc__)
    parser.usage = "compare.py CONFIG.toml [CONFIG.toml ...] [options] [--section.key VALUE ...]"
    add = parser.add_argument
    quick_help = "train N steps, beside softmax: not comparable with the board"
    add("--quick", type=positive_int, metavar="N", help=quick_help)
    check_help = "train seed 1 again, and compare it with its row in a folder like results/"
    add("--check", type=Path, metavar="ROWS", help=check_help)
    add("--base", type=Path, default=TRACK, metavar="FILE", help="recipe (default: the track's)")
    add("--board", type=Path, default=RESULTS, metavar="DIR", help="(default: results)")
    add("--jobs", type=positive_int, default=1, metavar="J", help="runs at once (default: 1)")
    tokens_help = "of each evaluation (default: %(default)s)"
    add("--eval-tokens", type=positive_int, default=2**18, metavar="N", help=tokens_help)
    if argv[:1] == ["--check"]:  # options follow the files
        argv = [*argv[2:], *argv[:2]]
    args, overrides = sweep.parse_with_configs(parser, argv)
    if args.check and args.quick:
        raise UserError("--check trains all steps: expected no --quick")
    args.nproc = None
    args.splits = [None, "val"]  # reported, chosen on
    return args, overrides


def main() -> None:
    args, overrides = parse_args(sys.argv[1:])
    recipe = load_config(args.base)
    for path in args.configs:
        if own_base := read_toml(Path(path)).get("base"):
            print(f"{path}: {args.base.name} takes the place of its base {own_base}")
    folder = "runs/track"
    if args.quick:
        folder = f"runs/quick_{args.quick}"
        warmup = min(args.quick, recipe.optimizer.warmup_steps)
        overrides += [f"--train.max-steps={args.quick}", f"--optimizer.warmup-steps={warmup}"]
        entrants = [path for path in args.configs if Path(path).resolve() != SOFTMAX]
        args.configs = [str(SOFTMAX), *entrants]
        print(f"NOT COMPARABLE with the board: {args.quick} steps (--quick)")
    if args.check:
        folder = "runs/check"
        overrides += ["--seed", "1"]
    overrides = ["--log.dir", folder, *overrides, "--base", str(args.base)]
    least = FACTORS[-1] * recipe.train.seq_len
    if args.eval_tokens < least:
        raise UserError(f"--eval-tokens {args.eval_tokens}: expected at least {least}, 16 T")
    jobs = sweep.make_jobs(args.configs, overrides)
    for job in jobs:
        check_rules(job.config, recipe, is_quick=args.quick is not None)
    checked = [find_run(args.check, job.config) for job in jobs] if args.check else []
    failures = sweep.run_all(jobs, args)
    trained = [job for job, failure in zip(jobs, failures, strict=True) if not failure]
    for job in trained:
        check_causal(job.config.name, load_model(job.run_dir).model.eval())
    if trained and not args.check:
        show_board([job.run_dir for job in trained], jobs[0].config, args)
    if any(failures):
        raise UserError("\n".join(filter(None, failures)))
    if args.check:
        theirs = measure.read_rows(args.check / ROWS)
        for job, run in zip(jobs, checked, strict=True):
            check_losses(run, measure.read_rows(job.run_dir), theirs)
            print(f"{run}: the row holds")


# ---------------------------------------------------------------- rules
def check_rules(config: Config, recipe: Config, is_quick: bool = False) -> None:
    """Raises UserError: a rule of the track is broken (see the top of this file)."""
    free = FREE_KEYS + (QUICK_KEYS if is_quick else ())
    is_softmax = measure.variant_of(config.name) == "softmax"
    for key, (expected, value) in changed_keys(recipe, config).items():
        if not key.startswith(free):
            raise UserError(f"{config.name}: {key} = {value!r}: expected {expected!r}, the track's")
        if is_softmax and key.startswith(VARIANT_KEYS):
            raise UserError(f"{config.name}: {key} = {value!r}: expected another name: --name NAME")
    check_text(config, recipe)
    n_params, n_softmax = map(measure.count_parameters, (config, recipe))
    most = int(MOST_PARAMETERS * n_softmax)
    if n_params > most:
        raise UserError(f"{config.name}: {n_params:,} parameters: expected at most {most:,}")
    model = GPT(config).eval()
    check_causal(config.name, model)
    check_cache(config.name, model)


def check_text(config: Config, recipe: Config) -> None:
    """Raises UserError: another text than the recipe's, which is published for the track."""
    expected = {split: f"sha256 {sha256}" for split, sha256 in PUBLISHED.items()}
    if recipe.data.dir != load_config(TRACK).data.dir:
        streams = [
            TokenStream(recipe.data.dir, "train"),
            open_text(recipe, None, split="val"),
            open_text(recipe, None),  # val again, in a dataset without a test split
        ]
        expected = {stream.split: stream.fingerprint for stream in streams}
    for split, fingerprint in expected.items():
        found = TokenStream(config.data.dir, split).fingerprint
        if found != fingerprint:
            problem = f"{config.data.dir}: {split} has {found}"
            raise UserError(f"{problem}: expected {fingerprint}, the recipe's text")


def check_causal(name: str, model: GPT) -> None:
    """Raises UserError: what follows a token changes its output, in float64. Before and after the
    training.
    """
    model = copy.deepcopy(model).double()
    model.choose_engine("auto", torch.float64)
    train_len = model.config.train.seq_len
    try:
        looks_ahead = is_changed_by_later(model, max(train_len, min(4 * train_len, CHECKED_TOKENS)))
    except UserError:  # ssmax_pn is of no length above T
        looks_ahead = is_changed_by_later(model, train_len)
    if looks_ahead:
        raise UserError(f"{name}: a row looks at later keys: expected causal attention")


@torch.no_grad()
def is_changed_by_later(model: GPT, length: int) -> bool:
    """Whether other later tokens change an output, or none at all."""
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.model.vocab_size, (1, length), generator=drawn)
    whole = model.hidden(tokens, UNSCALED)
    bound = 1e-6 * whole.abs().max()
    for cut in (length // 3, length // 2 + 3, length - 5):  # at no edge of a block
        other = torch.cat((tokens[:, :cut], tokens[:, cut:].flip(1)), dim=1)
        for seen in (other, tokens[:, :cut]):
            if (model.hidden(seen, UNSCALED)[:, :cut] - whole[:, :cut]).abs().max() > bound:
                return True
    return False


@torch.no_grad()
def check_cache(name: str, model: GPT) -> None:
    """Raises UserError: more than keys and values are kept, or no cache is possible."""
    if not model.cacheable:
        raise UserError(f"{name}: a position's output is never final: expected what can be cached")
    config = model.config.model
    cache = KVCache(config.n_layer, 8)
    model.hidden(torch.zeros(1, 8, dtype=torch.long), UNSCALED, cache)
    kept = sum(part[0, :, 0].numel() for held in cache.held for part in held)
    keys_and_values = 2 * config.n_layer * config.kv_heads * config.head_dim
    if kept > MOST_KEPT * keys_and_values:
        expected = f"expected {keys_and_values}, keys and values alone"
        raise UserError(f"{name}: {kept} numbers of a position are kept at inference: {expected}")


# ---------------------------------------------------------------- the board
class Entry(NamedTuple):
    """A variant at the rate and in the setting that the val split chose."""

    name: str
    setting: str
    runs: DataFrame  # its seeds at that rate
    n_rates: int
    losses: dict[int, Losses | None]  # by factor of T, on the reported text
    window: dict[int, Losses | None]  # the same in a rolling window of T
    minus: dict[int, Estimate | None]  # softmax's within T, beyond T in its rolling window

    def loss(self, factor: int) -> float:
        losses = self.losses[factor]
        return float(losses.values.mean()) if losses else math.inf


def show_board(folders: list[Path], config: Config, args: argparse.Namespace) -> None:
    """Print and draw the board with these runs, of which config is one."""
    runs = measure.describe_runs(folders)
    rows = measure.read_rows(*folders)
    title = f"NOT COMPARABLE: {args.quick} steps"
    if not args.quick:
        title = "The board"
        runs, rows = with_board(args.board, runs, rows)
    reported, chosen_on = (text_of(open_text(config, None, split=each)) for each in args.splits)
    if reported == chosen_on:
        print("this dataset has no test split: rates and scalings are chosen on what is reported")
    entries = make_entries(runs, rows, reported, chosen_on)
    print_board(entries, title)
    draw(entries, title, folders[0].parent / "compare.png")


def with_board(board: Path, runs: DataFrame, rows: DataFrame) -> tuple[DataFrame, DataFrame]:
    """With the board's runs of the same recipe. The own ones take the place of older.

    Raises UserError: the board has another attention of an own name.
    """
    theirs = track_runs(board)
    theirs = select(theirs, **{key: runs[key].iloc[0] for key in ("T", "steps", "dtype")})
    measure.refuse_another(theirs, runs, "variant", board)
    theirs = theirs[~theirs["run"].isin(runs["run"])]
    their_rows = measure.read_rows(board / ROWS)
    their_rows = their_rows[their_rows["run"].isin(theirs["run"])]
    return pandas.concat([theirs, runs]), pandas.concat([their_rows, rows])


def track_runs(board: Path) -> DataFrame:
    """Those of the board. The names of other studies have a folder."""
    runs = measure.read_runs(board)
    return runs[~runs["run"].str.contains("/")]


def make_entries(runs: DataFrame, rows: DataFrame, reported: str, chosen_on: str) -> list[Entry]:
    """All variants, the best at 16 T first. reported, chosen_on: texts.

    Of the rates of a variant those with the most seeds compete.
    """
    train_len = int(runs["T"].iloc[0])
    runs = runs.assign(rates=runs["run"].str.replace(r"_seed=\d+", "", regex=True))
    rows = select(rows, measure="same_targets")
    scored = runs[runs["run"].isin(select(rows, text=reported)["run"])]
    n_seeds = scored.groupby("rates")["run"].transform("size")
    is_whole = n_seeds == n_seeds.groupby(scored["variant"]).transform("max")
    columns = scored[["run", "variant", "rates"]].assign(step=scored["steps"].astype(int))
    rows = rows.merge(columns[is_whole], on=["run", "step"])
    longest = select(rows, text=chosen_on, length=FACTORS[-1] * train_len)
    longest = longest.fillna({"value": math.inf})
    means = longest.groupby(["variant", "rates", "window", "scaling"], sort=False)["value"].mean()
    entries: list[Entry] = []
    zero: dict[int, Losses | None] = {}
    for variant in means.index.unique("variant"):
        rates, window, scaling = means[variant].idxmin()
        own_rows = select(rows, text=reported, rates=rates)
        losses = losses_in(own_rows, train_len, window, scaling)
        in_window = losses_in(own_rows, train_len, train_len, "none")
        if variant == "softmax":
            zero = in_window
        setting = scaling.replace("none", "unscaled") if window == "0" else "window"
        own_runs = select(scored, rates=rates)
        n_rates = select(runs, variant=variant)["rates"].nunique()
        entries.append(Entry(variant, setting, own_runs, n_rates, losses, in_window, {}))
    entries = [each._replace(minus=measure.subtract(each.losses, zero)) for each in entries]
    return sorted(entries, key=lambda each: each.loss(FACTORS[-1]))


def losses_in(
    rows: DataFrame, train_len: int, window: str | int, scaling: str
) -> dict[int, Losses | None]:
    """By factor of T the losses in a setting."""
    own_rows = select(rows, window=window, scaling=scaling)
    return {factor: read_losses(select(own_rows, length=factor * train_len)) for factor in FACTORS}


def print_board(entries: list[Entry], title: str) -> None:
    """The differences, then the losses and what they cost."""
    print(
        f"\n{title}\n\nLoss within T minus softmax's, at 4 T and 16 T minus softmax's in its\n"
        "rolling window of T. ± is the 95 % interval, for n = 1 of documents; p, Holm's,\n"
        "is that of at least two seeds.\n"
    )
    print(measure.format_table(differences(entries), n_names=2))
    print(
        "\nLosses in nats; beyond T: what keys beyond the last T give at 16 T; a step's\n"
        "time over softmax's, on one machine; rates tried.\n"
    )
    print(measure.format_table(costs(entries)))
    if all(each.name != "softmax" for each in entries):
        print(f"\nno softmax of this recipe to compare with: python compare.py {SOFTMAX}")


def runs_of_softmax(entries: list[Entry]) -> DataFrame:
    return next((each.runs for each in entries if each.name == "softmax"), entries[0].runs)


def differences(entries: list[Entry]) -> list[list[str]]:
    """The lines of a table: what each entry's losses are minus softmax's."""
    known = {}
    softmax = runs_of_softmax(entries)
    for each in entries:
        minus = each.minus[FACTORS[-1]]
        # of one seed a small p says that trainings differ
        if minus and each.name != "softmax" and min(len(each.runs), len(softmax)) > 1:
            known[each.name] = minus.p
    p = dict(zip(known, holm([*known.values()]), strict=True))
    lines = [["variant", "context", "n", "T", "4 T", "16 T", "p"]]
    for each in entries:
        cells = map(format_difference, each.minus.values())
        own_p = f"{p[each.name]:.3f}" if each.name in p else "-"
        lines.append([each.name, each.setting, str(len(each.runs)), *cells, own_p])
    return lines


def costs(entries: list[Entry]) -> list[list[str]]:
    """The lines of a table: the losses, and what they cost."""
    softmax = runs_of_softmax(entries)
    lines = [["variant", "T", "4 T", "16 T", "beyond T", "time", "parameters", "rates"]]
    for each in entries:
        losses = [f"{each.loss(factor):.3f}" for factor in FACTORS]
        beyond = format_difference(measure.subtract(each.window, each.losses)[FACTORS[-1]])
        cost = step_time(each.runs, softmax), each.runs["parameters"].iloc[0]
        lines.append([each.name, *losses, beyond, *cost, str(each.n_rates)])
    return lines


def step_time(runs: DataFrame, softmax: DataFrame) -> str:
    """Over softmax's; "-" where it was trained on another machine alone."""
    pairs = runs.merge(softmax, on=["machine", "threads"])
    own, theirs = (
        pandas.to_numeric(pairs[column], errors="coerce").median()
        for column in ("minutes_x", "minutes_y")
    )
    return f"{own / theirs:.2f}" if theirs > 0 else "-"


def draw(entries: list[Entry], title: str, path: Path) -> None:
    """The losses, with the differences' intervals; dashed is softmax in its rolling window."""
    curves = []
    for each in entries:
        losses = [each.loss(factor) for factor in FACTORS]
        halves = [minus.half if minus else math.nan for minus in each.minus.values()]
        curves.append(Curve(f"{each.name}, {each.setting}", FACTORS, losses, halves))
        if each.name == "softmax":
            in_window = each._replace(losses=each.window)
            zero = [in_window.loss(factor) for factor in FACTORS]
            style = {"color": "0.3", "linestyle": "--", "marker": ""}
            curves.append(Curve("softmax, rolling window of T", FACTORS, zero, style=style))
    xlabel = "context, times the training length"
    measure.draw_curves(path, curves, title, "loss (nats)", xlabel=xlabel)


# ---------------------------------------------------------------- check
def find_run(board: Path, config: Config) -> str:
    """The name of the board's run that a training of this config repeats.

    Raises UserError: there is none, or its own file has another sha256.
    """
    variant, rate = measure.variant_of(config.name), measure.peak_rate(config)
    runs = select(track_runs(board), variant=variant, rate=rate, seed=1)
    if runs.empty:
        raise UserError(f"{board}: no run of {variant} with seed 1, rate {rate}")
    theirs, ours = runs["sha256"].iloc[0], measure.code_of(config)
    if ours != theirs:
        problem = f"{config.name}: its file has sha256 {ours or 'none'}"
        raise UserError(f"{problem}: expected {theirs or 'none'}, the row's")
    return str(runs["run"].iloc[0])


def check_losses(run: str, ours: DataFrame, theirs: DataFrame) -> None:
    """Compare the rows of a training with a run's on the board.

    Raises UserError: a loss differs by more than TOLERANCE and than the interval of the difference
    over documents, or MOST_TOLERANCE; or the row lacks one.
    """
    where = ["text", "length", "window", "scaling"]
    ours = select(ours.dropna(subset=["value"]), measure="same_targets")
    theirs = select(theirs, run=run, measure="same_targets")
    same = [*where, "block", "document"]
    pairs = ours.merge(theirs, on=same, how="left", suffixes=("", "_before"))
    lacking = pairs[pairs["value_before"].isna()]
    if len(lacking):
        text, length = lacking[["text", "length"]].iloc[0]
        raise UserError(f"{run}: the row has no losses, or not all, of text {text} at {length}")
    for key, cell in pairs.groupby(where, sort=False):
        blocks = tuple(zip(cell["block"], cell["document"], strict=True))
        values = (cell["value_before"] - cell["value"]).to_numpy()
        difference = estimate(Losses(values[None], blocks))
        most = max(TOLERANCE, min(difference.half, MOST_TOLERANCE))
        if abs(difference.value) > most:
            at = ", ".join(f"{name} {value}" for name, value in zip(where, key, strict=True))
            problem = f"the row has {cell['value_before'].mean():.4f} at {at}"
            expected = f"expected {cell['value'].mean():.4f} ±{most:.4f}"
            raise UserError(f"{run}: {problem}: {expected}")


if __name__ == "__main__":
    run_main(main)
