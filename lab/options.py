"""Options that the evaluations of lab/ share, besides those of `evaluation.add_arguments`."""

import argparse
from pathlib import Path

from infra.cli import ArgumentParser
from measure import check_figure
from positions import RopeScaling


def parse_with_picture(parser: ArgumentParser, name: str) -> argparse.Namespace:
    """The command's options with --rope, as `scaling`, and --out, where <name>.png goes.

    Raises UserError: no such scaling, or no figure's name in a folder that exists.
    """
    rope_help = "RoPE scaling: none, ntk, yarn, theta=500000 (default: none)"
    parser.add_argument("--rope", default="none", metavar="SCALING", help=rope_help)
    out_help = f"picture (default: {name}.png above the runs)"
    parser.add_argument("--out", type=Path, metavar="FILE", help=out_help)
    args = parser.parse_args()
    args.scaling = RopeScaling(args.rope)
    check_figure(args.out)
    return args
