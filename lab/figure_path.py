"""The command line of a script that draws one figure."""

from pathlib import Path

from evals.output import FIGURE_SUFFIXES
from infra.cli import ArgumentParser, UserError


def parse_figure_path(description: str | None) -> Path:
    """The path. Raises UserError: not a figure's suffix."""
    parser = ArgumentParser(description)
    parser.add_argument("out", type=Path, help="figure to write")
    out: Path = parser.parse_args().out
    if out.suffix not in FIGURE_SUFFIXES:
        raise UserError(f"{out}: expected a name that ends in {', '.join(FIGURE_SUFFIXES)}")
    return out
