"""lab/diagnose.py: the statistics of lab/attention_statistics.py by length, as means and by layer."""

import pytest
import torch
from conftest import save_run, write_dataset
from launch import CPU

from config import config_from_dict
from data.dataset import TokenStream
from evaluation import Blocks
from lab import diagnose
from lab.attention_statistics import STATISTICS, model_statistics
from measure import read_rows, select
from model import GPT
from positions import RopeScaling
from training.checkpoint import load_model

N_BLOCKS = 3


@pytest.fixture
def data(tmp_path):
    tokens = torch.randint(256, (64 * N_BLOCKS + 1,), generator=torch.Generator().manual_seed(0))
    return write_dataset(tmp_path / "data", {"val": tokens.numpy()}, 10**6)


def make_run(folder, name, data, **attention):
    values = {
        "name": name,
        "model": {"n_layer": 2, "n_head": 2, "n_embd": 64, "vocab_size": 257},
        "attention": attention,
        "data": {"dir": str(data)},
        "train": {"seq_len": 16, "batch_tokens": 16, "micro_batch": 1, "dtype": "float32", "max_steps": 1},
        "optimizer": {"warmup_steps": 0},
        "log": {"dir": str(folder)},
    }  # fmt: skip
    config = config_from_dict(values, "test")
    torch.manual_seed(0)
    return save_run(folder / name, config, GPT(config))


@pytest.mark.slow
def test_script(tmp_path, data, call, capsys):
    runs = tmp_path / "runs"
    a = make_run(runs, "a", data, normaliser="lssa", reweight_p=3)
    b = make_run(runs, "b", data, normaliser="ssmax_pn")
    call(diagnose, a, b, "--lengths", 16, 64, "--device", "cpu", "--rope", "ntk")
    gpt = load_model(a).model
    tokens = torch.from_numpy(TokenStream(data, "val").read(0, 64 * N_BLOCKS)).view(-1, 64)
    rows = read_rows(a)
    assert (rows.scaling == "ntk").all() and (rows.window == "0").all()
    for length in (16, 64):
        values = model_statistics(gpt, tokens[:, -length:], RopeScaling("ntk"), n_rows=8)
        # (N_BLOCKS, layers, heads)
        for name, expected in zip(STATISTICS, values.unbind(-1), strict=True):
            found = select(rows, measure=name, length=length).value.item()
            assert found == pytest.approx(expected.mean().item(), rel=1e-4, abs=1e-6)
            for layer in (0, 1):
                of_layer = select(rows, measure=f"{name}[{layer}]", length=length).value.item()
                mean = expected[:, layer].mean().item()
                assert of_layer == pytest.approx(mean, rel=1e-4, abs=1e-6)
    rejected = select(read_rows(b), measure="entropy").set_index("length").value
    assert rejected.notna().to_dict() == {16: True, 64: False}
    assert (runs / "diagnose.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert all(text in out for text in STATISTICS.values())
    assert "at 64: no result" in out and "64 keys" in out


def test_windows_end_where_their_blocks_do(tmp_path, data):
    gpt = load_model(make_run(tmp_path / "runs", "a", data)).model
    blocks = Blocks(TokenStream(data, "val"), 64, [64, 128], [0, 0])
    tokens = torch.from_numpy(blocks.stream.read(64, 128)).view(2, 64)
    got = diagnose.score(gpt, blocks, 16, 8, RopeScaling("ntk"), CPU, "a")
    want = model_statistics(gpt, tokens[:, -16:], RopeScaling("ntk"), 8).double()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
