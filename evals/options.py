"""The options of every evaluation."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import get_args

from infra.cli import ArgumentParser, UserError, positive_int
from positions import RopeKind, RopeScaling

FIGURE_SUFFIXES = (".png", ".pdf", ".svg")


def add_arguments(parser: ArgumentParser, lengths_help: str, tokens: int | None = None) -> None:
    """The options of every evaluation, and --tokens where it has a default."""
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="run folders or checkpoint files, first")
    add("--lengths", nargs="+", type=positive_int, metavar="T", help=lengths_help)
    add("--rope", choices=get_args(RopeKind), default="ntk", help="RoPE scaling (default: ntk)")
    add("--rope-theta", type=float, metavar="BASE", help="the base for --rope theta")
    add("--data", metavar="DIR", help="dataset folder (default: that of each run's config)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)")
    out_help = "figure of all runs (default: <script>.png in the folder above them)"
    add("--out", type=Path, metavar="FILE", help=out_help)
    add("--tag", metavar="WORD", help="part of the results' names: <script>_WORD.json")
    if tokens is not None:
        tokens_help = "at most N validation tokens, in whole blocks (default: %(default)s)"
        add("--tokens", type=positive_int, default=tokens, metavar="N", help=tokens_help)
        skip_help = "leave out the first N validation tokens, in whole blocks; needs a --tag"
        add("--skip", type=positive_int, default=0, metavar="N", help=skip_help)


def parse_arguments(parser: ArgumentParser, script: str) -> argparse.Namespace:
    """The command line. Adds `name`, of the results, and `rope_scaling`.

    Raises UserError: a bad option, --rope and --rope-theta that do not fit together.
    """
    args = parser.parse_args()
    if args.tag and not re.fullmatch(r"[\w.+-]+", args.tag):
        raise UserError(f"--tag {args.tag}: expected only letters, digits and . _ + -")
    if getattr(args, "skip", 0) and not args.tag:
        raise UserError(f"--skip {args.skip}: expected a --tag, for results beside the usual ones")
    args.name = f"{script}_{args.tag}" if args.tag else script
    args.rope_scaling = RopeScaling(args.rope, args.rope_theta)
    check_figure(args.out)
    return args


def check_figure(out: Path | None) -> None:
    """Raises UserError: --out is given and is no figure's name in a folder that exists."""
    if out and (out.suffix not in FIGURE_SUFFIXES or not out.parent.is_dir()):
        raise UserError(f"--out {out}: expected {', '.join(FIGURE_SUFFIXES)} in a folder that exists")
