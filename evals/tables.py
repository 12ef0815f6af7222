"""Numbers and tables of the evaluations as text. A result is what a script writes into its JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def format_stderr(mean: float, stderr: float | None) -> str:
    return f"{mean:.4f} ±{stderr:.4f}" if stderr is not None else f"{mean:.4f} ±-"


def format_length(length: int) -> str:
    """2048 -> '2K'; 128 -> '128'."""
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


def format_rope(result: dict[str, Any]) -> str:
    """'ntk', 'theta = 500000'."""
    rope = result["rope"]
    return rope["kind"] + (f" = {rope['theta']:g}" if rope["theta"] else "")


def format_table(rows: list[list[str]]) -> str:
    """Aligned columns, two to the left and numbers to the right; a rule below the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in [rows[0], ["-" * width for width in widths], *rows[1:]]:
        left = [text.ljust(width) for text, width in zip(row[:2], widths, strict=False)]
        right = [text.rjust(width) for text, width in zip(row[2:], widths[2:], strict=True)]
        lines.append("  ".join(left + right).rstrip())
    return "\n".join(lines)


def length_table(results: list[dict[str, Any]], cell: Callable[[dict[str, Any]], str]) -> str:
    """Runs down, lengths across, a dash for a rejected length.

    Args:
        cell: formats one entry of a result's "lengths".
    """
    lengths = [str(entry["length"]) for entry in results[0]["lengths"]]
    rows = [["run", "normaliser", "step", "trained at", *lengths]]
    for result in results:
        cells = [cell(entry) if entry["reason"] is None else "-" for entry in result["lengths"]]
        head = [result["run"], result["normaliser"], str(result["step"]), str(result["train_len"])]
        rows.append(head + cells)
    return format_table(rows)


def rejections(results: list[dict[str, Any]], key: str = "lengths") -> list[str]:
    """A paragraph with the reason of each entry without numbers, if there are any."""
    lines = []
    for result in results:
        for entry in result[key]:
            if entry["reason"] is not None:
                depth = f", {entry['depth']} %" if "depth" in entry else ""
                lines.append(f"{result['run']} at {entry['length']}{depth}: no result: {entry['reason']}")
    return ["\n".join(lines)] if lines else []
