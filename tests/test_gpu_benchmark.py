"""benchmarks/gpu.py on the CPU: rows on disk at once, resuming after a kill, deadline, targets."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed (it exists for Linux only)")

from benchmarks import gpu
from engines.fused_kernels import INTERPRETED

LATER = time.time() + 1e6


def keys(path: Path) -> list[str]:
    return [row["key"] for row in gpu.read_rows(path)]


def killed() -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def run_killed(plan: Any, path: Path) -> None:
    child = multiprocessing.get_context("fork").Process(target=gpu.run_part, args=(plan, path, LATER, False))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL


def test_a_killed_part_resumes_where_it_was(tmp_path):
    path, calls = tmp_path / "rows.jsonl", []

    def row(name: str) -> Any:
        return lambda: calls.append(name) or {"value": 1.0}

    plan = [("a", row("a")), ("b", killed), ("c", row("c"))]
    run_killed(plan, path)
    assert keys(path) == ["a"]
    with path.open("a") as file:
        file.write('{"key": "b", "val')  # killed while writing
    assert gpu.run_part([("a", row("a")), ("b", row("b")), ("c", row("c"))], path, LATER, False)
    assert calls == ["b", "c"]
    assert keys(path) == ["a", "b", "c"]


def test_a_row_that_kills_its_process_is_given_up_after_the_second_time(tmp_path):
    path, plan = tmp_path / "rows.jsonl", [("a", killed), ("b", lambda: {"value": 1.0})]
    run_killed(plan, path)
    run_killed(plan, path)
    assert gpu.run_part(plan, path, LATER, False)
    assert keys(path) == ["a", "b"] and "failed" in gpu.read_rows(path)[0]


def test_failed_rows_are_recorded_and_retried_on_demand(tmp_path):
    path = tmp_path / "rows.jsonl"

    def fails() -> dict[str, Any]:
        raise RuntimeError("out of\nmemory")

    assert gpu.run_part([("a", fails)], path, LATER, False)
    assert gpu.read_rows(path)[0]["failed"] == "RuntimeError: out of"
    assert gpu.run_part([("a", killed)], path, LATER, False)  # not measured again
    assert gpu.run_part([("a", lambda: {"value": 2.0})], path, LATER, True)
    assert gpu.run_part([("a", killed)], path, LATER, True)
    assert keys(path) == ["a", "a"]


def test_deadline_and_other_machines(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    assert not gpu.run_part([("a", killed)], path, time.time() + 20, False)
    assert "stopped before a" in capsys.readouterr().out
    path.write_text(json.dumps({"key": "a", "took": 1.0, "on": "another GPU"}) + "\n")
    assert gpu.run_part([("a", lambda: {"value": 2.0})], path, LATER, False)
    assert keys(path) == ["a", "a"]


def test_targets(tmp_path, capsys):
    values = {"decode | n=65536": {"ratio": 0.8}, "step | LSSAR": {"ratio": 1.2}}
    lines = [json.dumps({"key": key, "took": 1.0, "on": "x"} | row) for key, row in values.items()]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    gpu.report(tmp_path / "rows.jsonl")
    out = capsys.readouterr().out
    assert "- holds        decoding with 65,536 keys / softmax: 0.8" in out
    assert "- MISSED       training step / softmax's: 1.2" in out
    assert "- not measured peak memory of a step" in out


@pytest.mark.skipif(not INTERPRETED, reason="triton was imported before TRITON_INTERPRET was set")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "part", ["tune", *(pytest.param(p, marks=pytest.mark.slow) for p in ("main", "lengths", "long"))]
)
def test_every_part_runs(part, tmp_path, call, capsys):
    call(gpu, part, "--smoke", "--out", tmp_path)
    rows = gpu.read_rows(tmp_path / "rows.jsonl")
    missing = ("FlashAttention-3", "AdaSplash-2")  # here
    failed = [row for row in rows if "failed" in row and not row["key"].endswith(missing)]
    assert len(rows) >= 4 and not failed
    before = (tmp_path / "rows.jsonl").read_bytes()
    call(gpu, part, "--smoke", "--out", tmp_path)
    assert (tmp_path / "rows.jsonl").read_bytes() == before
    assert f"{part} is complete" in capsys.readouterr().out
