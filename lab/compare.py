"""A variant of one's own among the published ones of scale A, from a config file to a table and
figures.

    python -m lab.compare my_softmax.toml                # both published learning rates
    python -m lab.compare my_softmax.toml configs/comparison/A/softmax.toml --fresh --seed 1   # on other text

A file states its [attention], [[layers]], positions, window, attention_gate and key_shift, on top
of configs/comparison/A.toml. The same command resumes. What cannot be compared is refused before
the training. Writes the table, the figures and the runs to runs/compare/<file>/, or --out. The
published text is the library of Python 3.11.7, which data.python_source prepares there. With
--fresh any text will do, and the table has these files alone.
"""

import argparse
import sys
import tomllib
from pathlib import Path

import sweep
from config import changed_keys, load_config, parse_overrides
from data.dataset import TokenStream
from evals.rows import identity_of
from infra.cli import ArgumentParser, UserError, run_main
from infra.distributed import StopSignals
from infra.files import exclusive_lock, read_jsonl, write_atomically
from lab import comparison
from lab.report import RESULTS
from lab.runs import read_run, recipe_of, without_seed
from lab.styles import N_SHOWN
from lab.tables import CONFIGS, PAPERS_FOLDER, check_ours, markdown

BASE = CONFIGS / "comparison/A.toml"
N_TOKENS = 131072  # of an evaluation; the text on which nothing is chosen is as long and follows it
TITLE = "# The comparison with "


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    """Our options, and overrides for all runs."""
    parser = ArgumentParser(__doc__)
    parser.usage = "%(prog)s CONFIG.toml [CONFIG.toml ...] [options] [--section.key VALUE ...]"
    add = parser.add_argument
    add("configs", nargs="+", metavar="CONFIG", help="config files, first")
    rates = [2e-3, 4e-3]
    add(
        "--rates",
        nargs="+",
        type=float,
        default=rates,
        metavar="LR",
        help="learning rates (default: both)",
    )
    add("--fresh", action="store_true", help="without the published records")
    add("--out", type=Path, metavar="DIR", help="(default: runs/compare/<name of the first file>)")
    args, extra = parser.parse_known_args()
    args.out = args.out or Path("runs/compare") / Path(args.configs[0]).stem
    ours = {"optimizer.lr": "--rates", "log.dir": "--out"}
    for key in ours.keys() & parse_overrides(extra).keys():
        raise UserError(f"--{key}: expected {ours[key]}, which decides it here")
    check_ours(args.out / "README.md", TITLE)
    return args, extra


def main() -> None:
    args, extra = parse_args()
    records = (
        [] if args.fresh else [r for r in read_jsonl(RESULTS / "A.jsonl") if r["kind"] == "run"]
    )
    base = ["--base", str(BASE), *extra]
    at_rates = {f"{args.out}/lr={lr:g}": [*base, "--optimizer.lr", str(lr)] for lr in args.rates}
    overrides = [[*options, "--log.dir", folder] for folder, options in at_rates.items()]
    jobs = [job for each in overrides for job in sweep.make_jobs(args.configs, each, None)]
    for job in jobs:
        check_comparable(job, records)
        if job.warn_of_changed_code():
            raise UserError(
                f"{job.config.run_dir}: a run of other code: remove it, or choose --out"
            )
    with StopSignals() as stop:
        for each in overrides:
            run(stop, "sweep.py", *args.configs, *each, "--eval-tokens", str(N_TOKENS))
        if not all(job.is_trained() for job in jobs):
            raise UserError("stopped before the last step of a run; the same command resumes")
        for job in jobs:
            evaluate_unseen(job, stop)
    write_report(jobs, records, args.out)


def check_comparable(job: sweep.Job, records: list[comparison.Record]) -> None:
    """Raises UserError: another recipe than the base's, or another text or a name that the records
    have.
    """
    config = job.config
    if config.init_from:
        raise UserError(
            f"{config.name}: init_from = {config.init_from!r}: expected none, as all of scale A have"
        )
    base = load_config(BASE)
    recipe = {
        key
        for each in (base, config)
        for key in recipe_of(each, *comparison.OWN_KEYS, "optimizer.lr")
    }
    for key, (old, new) in changed_keys(base, config).items():
        if key in recipe:
            raise UserError(
                f"{config.name}: {key} = {new!r}: expected {old!r}, as all of scale A have"
            )
    for key, split in (("fingerprint", "val"), ("train", "train")):
        stream = TokenStream(config.data.dir, split)
        stream.check_model(config.model.vocab_size)
        texts = [identity_of(record["data"][key]) for record in records if key in record["data"]]
        if texts and texts[0] != identity_of(stream.fingerprint):
            ours = f"{split} has {stream.info['tokenizer']} tokens, {stream.fingerprint}"
            expected = f"expected bytes of Python 3.11.7's library, sha256 {texts[0]}, or --fresh"
            raise UserError(f"{config.data.dir}: {ours}: {expected}")
    name = without_seed(config.name)
    if name in {record["contestant"] for record in records}:
        raise UserError(
            f"{name}: a published variant has this name; expected another name, or --fresh"
        )


def run(stop: StopSignals, script: str, *arguments: str) -> None:
    """Run a script of this repo, which receives our signals; exit if it fails, or after a signal."""
    status = sweep.run([sys.executable, str(CONFIGS.parent / script), *arguments], stop, None, None)
    if status or stop.number:
        sys.exit(status or 128 + stop.number)


def evaluate_unseen(job: sweep.Job, stop: StopSignals) -> None:
    """Score the text on which nothing is chosen, once, as the published runs were."""
    length = job.config.train.seq_len
    text = f"--skip {N_TOKENS} --tokens {N_TOKENS} --lengths {length} {16 * length}".split()
    if not (job.config.run_dir / "eval_length_unseen_none.json").exists():  # written last
        options = [*text, "--data", job.config.data.dir, "--tag", "unseen", "--also", "none"]
        run(stop, "eval_length.py", str(job.config.run_dir), *options)


def write_report(jobs: list[sweep.Job], records: list[comparison.Record], out: Path) -> None:
    """Write the comparison of these runs and the published ones, and print the lines in colour."""
    own = [comparison.record_of(each) for job in jobs if (each := read_run(job.config.run_dir))]
    comparison.check_comparable([*records, *own])
    scale = comparison.read_scale([*records, *own])
    table = comparison.main_table(scale.runs, scale.losses)
    settings = tomllib.loads((PAPERS_FOLDER / "comparison.toml").read_text(encoding="utf-8"))
    names = list(dict.fromkeys(record["contestant"] for record in own))
    settings["shown"] = list(dict.fromkeys([*names, *settings["shown"]]))[:N_SHOWN]
    with exclusive_lock(out):
        parts = [TITLE + ", ".join(names)]
        parts += comparison.scale_parts("A", scale, table, settings, out)
        write_atomically(out / "README.md", ("\n\n".join(parts) + "\n").encode())
    ends = [3, table.columns.get_loc("16x − 1x") - 1, *range(-4, 0)]
    shown = table[table.index.isin(settings["shown"])].iloc[:, [0, 1, 2, *ends]]
    print(markdown(shown.reset_index(), n_left=2))
    print(f"wrote {out / 'README.md'}, with all {len(table)} variants")


if __name__ == "__main__":
    run_main(main)
