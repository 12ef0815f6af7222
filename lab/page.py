"""The results as one page that needs no network: choose models, hover over lines, sort the table.

    python -m lab.page      # results/rows.csv.gz and runs.csv -> results/index.html

The numbers are means over seeds with their standard deviations, of the rows of four studies.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from infra.cli import ArgumentParser, run_main
from infra.files import write_atomically
from lab.results import FOLDER, LONG_TEXT, TRACK_LINES, Records, read_records
from measure import read_runs

TEMPLATE = Path(__file__).with_suffix(".html")
DIGITS = 4


class Study(NamedTuple):
    """Which rows of results/ a scale of the page has."""

    prefix: str  # of the runs' names
    measure: str
    lengths: tuple[int, ...]
    window: str  # the first column, before the lengths; "" if there is none
    shown: tuple[str, ...]  # in colour at first
    text: str = ""  # of the rows, where there are two


STUDIES = {
    "the track, T = 256": Study(
        "", "same_targets", (256, 512, 1024, 2048, 4096), "256",
        tuple(model for _, model, window, _ in TRACK_LINES if window == "0"), LONG_TEXT,
    ),
    "subwords, T = 128": Study(
        "context", "same_targets", (256, 512, 1024, 2048), "128 recomputed",
        ("softmax", "ssmax_qk_norm", "windows_16_fox", "stick_breaking_lr=4e-3", "fox"),
    ),
    "bytes, T = 256": Study(
        "A", "loss", (256, 512, 1024, 2048, 4096), "",
        ("softmax", "ssmax_qk_norm", "lssar_p15_warmup", "windows_32_fox", "stick_breaking"),
    ),
    "bytes, T = 512": Study(
        "B", "loss", (512, 1024, 2048, 4096, 8192), "",
        ("softmax", "ssmax_qk_norm", "lssar_p15_warmup", "windows_32_fox", "stick_breaking"),
    ),
}  # fmt: skip


def main() -> None:
    ArgumentParser(__doc__).parse_args()
    out = FOLDER / "index.html"
    write_atomically(out, page(read_records()).encode())
    print(f"wrote {out}")


def page(records: Records) -> str:
    """The HTML, with the data of every study."""
    scales = {name: scale_data(records, study) for name, study in STUDIES.items()}
    # a name may be `</script>` or `<!--`
    data = json.dumps(scales, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    return TEMPLATE.read_text(encoding="utf-8").replace("DATA", data)


def scale_data(records: Records, study: Study) -> dict[str, Any]:
    """The columns of a study, and of each model at each RoPE scaling its numbers, best first."""
    runs = read_runs(FOLDER).set_index("run")
    variants = []
    for model, rows in records.models.items():
        folder, _, name = (model if "/" in model else f"/{model}").partition("/")
        if folder != study.prefix:
            continue
        first = runs.loc[rows["run"].iloc[0]]
        measured = rows[rows["measure"] == study.measure]
        if study.text:
            measured = measured[measured["text"] == study.text]
        is_window = (measured["window"] == study.window) & (measured["length"] == study.lengths[-1])
        window, measured = measured[is_window], measured[measured["window"] == "0"]
        for scaling, at_scaling in measured.groupby("scaling"):
            tables = [window] if study.window else []
            tables += [at_scaling[at_scaling["length"] == n] for n in study.lengths]
            seeds = [table.groupby("run")["value"].mean() for table in tables]
            variants.append(
                {
                    "name": name,
                    "what": first["options"],
                    "rope": scaling,
                    "seeds": rows["run"].nunique(),
                    "rate": first["rate"],
                    "losses": [rounded(each.mean()) for each in seeds],
                    "spreads": [rounded(each.std()) for each in seeds],
                }
            )
    variants.sort(key=lambda each: each["losses"][-1] or math.inf)
    columns = [f"window of {study.window.split()[0]}"] if study.window else []
    return {
        "columns": columns + [f"{n:,}" for n in study.lengths],
        "shown": study.shown,
        "variants": variants,
    }


def rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, DIGITS)


if __name__ == "__main__":
    run_main(main)
