"""benchmarks/gpu.py and saved_tensors.py on a CPU."""

import json

import pytest

pytest.importorskip("triton", reason="triton is not installed (it exists for Linux only)")

import model
from benchmarks import gpu, saved_tensors
from config import load_config
from engines.triton_kernels import INTERPRETED
from positions import rotate_pairs


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
    assert [record["part"] for record in records[:16]] == [
        "attention",
        *["step"] * 10,
        *["decode"] * 5,
    ]
    assert records[0]["name"] == "LSSAR p=15" and len(records) == 27


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="triton was imported before TRITON_INTERPRET was set")
def test_lssar_keeps_what_softmax_keeps(monkeypatch):
    """Also with a memory budget, which saves a third."""
    monkeypatch.setattr(model, "apply_rope", rotate_pairs)
    sizes = {}
    for name in ("softmax", "lssar"):
        config = load_config(f"configs/{name}.toml")
        sizes[name] = [saved_tensors.block_bytes(config, budget) for budget in (1.0, 0.99)]
    (softmax, less_of_softmax), (lssar, less_of_lssar) = sizes["softmax"], sizes["lssar"]
    assert softmax < lssar < 1.02 * softmax
    assert less_of_softmax < less_of_lssar < 1.02 * less_of_softmax < 0.65 * softmax
