"""benchmarks/gpu.py on a CPU."""

import json

import pytest

pytest.importorskip("triton", reason="triton is not installed (it exists for Linux only)")

from benchmarks import gpu
from engines.triton_kernels import INTERPRETED


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="triton was imported before TRITON_INTERPRET was set")
@pytest.mark.filterwarnings("ignore")
def test_smoke(call, tmp_path, monkeypatch):
    rows = tmp_path / "gpu" / "rows.jsonl"
    monkeypatch.setattr(gpu, "ROWS", rows)
    with pytest.raises(SystemExit) as status:
        call(gpu, "--smoke")
    records = [json.loads(line) for line in rows.read_text().splitlines()]
    assert not status.value.code and not any("failed" in record for record in records)
    parts = [record["part"] for record in records[:11]]
    assert parts == ["attention", *["step"] * 5, *["decode"] * 5]
    assert records[0]["name"] == "LSSAR p=15" and len(records) == 31
