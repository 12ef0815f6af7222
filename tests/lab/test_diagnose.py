"""lab/diagnose.py: the statistics of lab/attention_statistics.py by length, as means and by head."""

import pytest
import torch
from launch import CPU
from test_eval_length import N_BLOCKS, data, make_run

from data.dataset import TokenStream
from evals.common import Blocks
from infra.files import read_json as read
from lab import diagnose
from lab.attention_statistics import STATISTICS, model_statistics
from lab.rows import read_rows
from positions import RopeScaling
from training.checkpoint import load_model

__all__ = ["data"]  # a fixture


@pytest.mark.slow
def test_script(tmp_path, data, call, capsys):
    runs = tmp_path / "runs"
    a = make_run(runs, "a", data, normaliser="lssa", reweight_p=3)
    b = make_run(runs, "b", data, normaliser="ssmax_pn")
    call(diagnose, a, b, "--lengths", 16, 64, "--device", "cpu")
    gpt = load_model(a).model
    tokens = torch.from_numpy(TokenStream(data, "val").read(0, 64 * N_BLOCKS)).view(-1, 64)
    for entry, length in zip(read(a / "diagnose.json")["lengths"], (16, 64), strict=True):
        values = model_statistics(gpt, tokens[:, -length:], RopeScaling("ntk"), n_rows=8)
        # (N_BLOCKS, layers, heads)
        for name, expected in zip(STATISTICS, values.unbind(-1), strict=True):
            heads = torch.tensor(entry["heads"][name])
            assert heads.shape == (2, 2)
            torch.testing.assert_close(heads, expected.mean(0), atol=1e-5, rtol=1e-5)
            means = expected.mean((1, 2))
            assert entry["mean"][name] == pytest.approx(means.mean().item(), rel=1e-4, abs=1e-6)
            error = means.std().item() / N_BLOCKS**0.5
            assert entry["stderr"][name] == pytest.approx(error, rel=1e-3, abs=1e-6)
    call(diagnose, a, "--lengths", 16, 64, "--device", "cpu", "--skip", 64, "--tag", "rest")
    _, rest = read(a / "diagnose_rest.json")["lengths"]
    assert rest["mean"]["qk_std"] == pytest.approx(values[1:, ..., 0].mean().item(), rel=1e-4)
    rejected = read(b / "diagnose.json")["lengths"]
    assert rejected[0]["reason"] is None and "64 keys" in rejected[1]["reason"]
    for figure in (a / "diagnose.png", b / "diagnose.png", runs / "diagnose.png"):
        assert figure.read_bytes().startswith(b"\x89PNG")
    rows = read_rows([a])
    keys = rows[rows.evaluation == "diagnose"].groupby("length").measure.agg(list)
    assert keys[16] == keys[64] == 2 * [*STATISTICS]  # of two texts
    out = capsys.readouterr().out
    assert all(text in out for text in STATISTICS.values()) and "b at 64: no result" in out


def test_windows_end_where_their_blocks_do(tmp_path, data):
    gpt = load_model(make_run(tmp_path / "runs", "a", data)).model
    blocks = Blocks(TokenStream(data, "val"), [16, 64], 2, n_skipped=1)
    tokens = torch.from_numpy(blocks.stream.read(64, 128)).view(2, 64)
    got = diagnose.score(gpt, blocks, 16, 8, RopeScaling("ntk"), CPU)
    want = model_statistics(gpt, tokens[:, -16:], RopeScaling("ntk"), 8).double()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
