"""benchmarks/gpu.py on a CPU: it runs, and its rows are kept."""

import json

import pytest

pytest.importorskip("triton", reason="triton is not installed (it exists for Linux only)")

from benchmarks import gpu
from engines.triton_kernels import INTERPRETED


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="triton was imported before TRITON_INTERPRET was set")
@pytest.mark.filterwarnings("ignore")
def test_smoke(call, tmp_path, monkeypatch):
    monkeypatch.setenv("GPU_ROWS", str(tmp_path))
    monkeypatch.setattr(gpu, "ROWS", tmp_path / "gpu" / "rows.jsonl")
    with pytest.raises(SystemExit) as status:
        call(gpu, "--smoke")
    records = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert not status.value.code and not any("failed" in record for record in records)
    assert [record["part"] for record in records[:4]] == ["attention", "step", "step", "step"]
    assert records[0]["name"] == "LSSAR p=15" and len(records) == 11
