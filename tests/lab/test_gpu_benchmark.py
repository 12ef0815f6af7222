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
from engines.triton_kernels import INTERPRETED

LATER = time.time() + 1e6


def keys(path: Path) -> list[str]:
    return [row["key"] for row in gpu.read_rows(path)]


def killed() -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def run(plan: Any, path: Path, retry: bool = False, deadline: float = LATER) -> bool:
    return gpu.run_part(plan, path, deadline, gpu.finished(path, retry, since=time.time()))


def run_killed(plan: Any, path: Path) -> None:
    child = multiprocessing.get_context("fork").Process(target=run, args=(plan, path))
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
    assert run([("a", row("a")), ("b", row("b")), ("c", row("c"))], path)
    assert calls == ["b", "c"]
    assert keys(path) == ["a", "b", "c"]


def test_a_row_that_kills_its_process_is_given_up_after_the_second_time(tmp_path):
    path, plan = tmp_path / "rows.jsonl", [("a", killed), ("b", lambda: {"value": 1.0})]
    run_killed(plan, path)
    run_killed(plan, path)
    assert run(plan, path)
    assert keys(path) == ["a", "b"] and "failed" in gpu.read_rows(path)[0]


def test_failed_rows_and_those_of_other_kernels_are_retried_on_demand(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"

    def fails() -> dict[str, Any]:
        raise RuntimeError("out of\nmemory")

    assert run([("a", fails)], path)
    assert gpu.read_rows(path)[0]["failed"] == "RuntimeError: out of"
    assert run([("a", killed)], path)  # not measured again
    assert run([("a", lambda: {"value": 2.0})], path, retry=True)
    assert run([("a", killed)], path, retry=True)
    assert keys(path) == ["a", "a"]
    monkeypatch.setattr(gpu, "kernels", lambda: "others")
    assert run([("a", killed)], path)
    assert run([("a", lambda: {"value": 3.0})], path, retry=True)
    assert keys(path) == ["a", "a", "a"]


ROW = {"took": 1.0, "at": 0.0, "on": "another GPU", "kernels": gpu.kernels()}


def test_deadline_and_other_machines(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    assert not run([("a", killed)], path, deadline=time.time() + 20)
    assert "stopped before a" in capsys.readouterr().out
    path.write_text(json.dumps({"key": "a", **ROW}) + "\n")
    assert run([("a", lambda: {"value": 2.0})], path)
    assert keys(path) == ["a", "a"]


def test_report(tmp_path, capsys):
    """Targets of each machine on its own; rows of other kernels are marked."""
    rows = [
        {"key": "decode | n=65536", "ratio": 0.8, **ROW},
        {"key": "step | LSSAR", "ratio": 1.2, **ROW, "kernels": "others"},
        {"key": "decode | n=65536", "ratio": 1.8, **ROW, "on": "a third GPU"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    gpu.report(tmp_path / "rows.jsonl")
    first, second = capsys.readouterr().out.split("# a third GPU")
    assert "- holds        decoding with 65,536 keys / softmax: 0.8 (expected 0 to 1)\n" in first
    assert "- MISSED       training step / softmax's: 1.2 (expected 0 to 1.1) (other kernels)" in first
    assert "- not measured peak memory of a step" in first
    assert "- MISSED       decoding with 65,536 keys / softmax: 1.8" in second


@pytest.mark.skipif(not INTERPRETED, reason="triton was imported before TRITON_INTERPRET was set")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "part", ["tune", *(pytest.param(p, marks=pytest.mark.slow) for p in ("main", "lengths", "long"))]
)
def test_every_part_runs(part, tmp_path, call, capsys):
    arguments = [part, "--smoke", "--out", tmp_path, "--until", LATER]
    call(gpu, *arguments)
    rows = gpu.read_rows(tmp_path / "rows.jsonl")
    missing = ("FlashAttention-3", "AdaSplash-2")  # here
    failed = [row for row in rows if "failed" in row and not row["key"].endswith(missing)]
    assert len(rows) >= 4 and not failed
    before = (tmp_path / "rows.jsonl").read_bytes()
    call(gpu, *arguments)
    assert (tmp_path / "rows.jsonl").read_bytes() == before
    assert f"{part} is complete" in capsys.readouterr().out
