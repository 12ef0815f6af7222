"""The comparison as one page that needs no network: choose variants, hover over lines, sort the
table.

    python -m lab.page                          # results/comparison/*.jsonl -> results/comparison/index.html
    python -m lab.page runs/comparison_report   # that of a folder that lab.report --comparison wrote

The numbers are those of the tables: means over seeds, standard deviations, differences to softmax.
"""

import json
import tomllib
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.colors import to_hex

from infra.cli import ArgumentParser, UserError, run_main
from infra.files import read_jsonl, write_atomically
from lab import comparison
from lab.report import RESULTS
from lab.styles import COLOURS
from lab.tables import PAPERS_FOLDER

TEMPLATE = Path(__file__).with_suffix(".html")
DIGITS = 6


def parse_args() -> Path | None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="(default: results/comparison)")
    folder: Path | None = parser.parse_args().folder
    return folder


def main() -> None:
    folder = parse_args() or RESULTS
    out = folder / "index.html"
    write_atomically(out, page(folder).encode())
    print(f"wrote {out}")


def page(folder: Path) -> str:
    """The HTML, with the data of every scale that has records. Raises UserError: there are none."""
    paths = [path for path in sorted(folder.glob("*.jsonl")) if path.stem != "recall"]
    if not paths:
        raise UserError(f"{folder}: expected the records of a scale, such as A.jsonl; found none")
    scales = {path.stem: scale_data(path) for path in paths}
    settings = tomllib.loads((PAPERS_FOLDER / "comparison.toml").read_text(encoding="utf-8"))
    data = json.dumps(
        {"shown": settings["shown"], "scales": scales}, ensure_ascii=False, allow_nan=False
    )
    return TEMPLATE.read_text(encoding="utf-8").replace("DATA", data.replace("</", "<\\/"))


def scale_data(path: Path) -> dict[str, Any]:
    """The lengths of a scale, and of each variant what it is and its numbers, in the order of the
    table.
    """
    records = read_jsonl(path)
    if not any(record.get("kind") == "run" for record in records):
        raise UserError(f"{path}: expected the records of a scale, by lab.report --comparison")
    scale = comparison.read_scale(records)
    table = comparison.main_table(scale.runs, scale.losses)
    means = comparison.seed_means(scale.losses)
    longest = scale.losses[scale.losses.length == scale.losses.length.max()]
    same_targets = longest.groupby(["variant", "seed"]).same.mean().groupby("variant").mean()
    costs = {each["contestant"]: each["ratio"] for each in records if each["kind"] == "cost"}
    names = path.with_name(f"{path.stem}_variants.csv")
    what = pd.read_csv(names, index_col="variant")["what it is"] if names.exists() else {}
    variants = [
        {
            "name": name,
            "what": what.get(name, ""),
            "colour": to_hex(COLOURS[name]) if name in COLOURS else None,
            "rope": table.RoPE[name],
            "seeds": int(table.seeds[name]),
            "lr": table.lr[name],
            "losses": rounded(means.loc[name].mean()),
            "spreads": rounded(means.loc[name].std()),
            "same targets, longest": round(same_targets[name], DIGITS)
            if name in same_targets
            else None,
            "step": round(costs[name], 2) if name in costs else None,
        }
        for name in table.index
    ]
    return {"lengths": [int(length) for length in means], "variants": variants}


def rounded(numbers: pd.Series) -> list[float | None]:
    return [None if pd.isna(number) else round(number, DIGITS) for number in numbers]


if __name__ == "__main__":
    run_main(main)
