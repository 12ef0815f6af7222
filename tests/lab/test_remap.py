"""lab/remap.py: scores pair by pair from RoPE at the remapped distance, and models that need none."""

import pytest
import torch
from conftest import one_line
from test_eval_length import data, make_run
from test_model import make_gpt, random_tokens

from data.dataset import TokenStream
from eval_length import block_losses
from evals.common import Blocks
from lab import remap
from lab.rows import read_rows
from positions import UNSCALED, apply_rope
from training.checkpoint import load_model

__all__ = ["data"]  # a fixture


def distance(i: int, j: int, near: int, group: int) -> int:
    if i - j < near:
        return i - j
    return i // group - j // group + near - near // group if group else near


@torch.no_grad()
@pytest.mark.parametrize("group", [0, 3])
@pytest.mark.parametrize(
    ("options", "model"),
    [
        ({"normaliser": "softmax"}, {}),
        ({"normaliser": "ssmax", "scores": "cosine"}, {"attention_gate": True}),
        (
            {"normaliser": "lssa", "reweight_p": 3, "output_norm": True},
            {"n_kv_head": 1, "window": 6},
        ),
    ],
)
def test_scores_pair_by_pair(options, model, group):
    gpt = make_gpt(options, std=0.5, n_layer=1, **model)
    tokens = random_tokens(2, 12)
    ((cos, sin),) = gpt.rope(tokens, UNSCALED)
    attention = gpt.blocks[0].attention
    x = gpt.blocks[0].attention_norm(gpt.embedding(tokens))
    q, k, v, _ = attention.project(x, torch.ones_like(cos), torch.zeros_like(sin))  # before RoPE
    layer = attention.normaliser
    context = layer.context(q, k)
    scores = torch.full((2, q.shape[1], 12, 12), remap.HIDDEN)
    for i in range(12):
        for j in range(i + 1):
            at = slice(distance(i, j, 4, group), distance(i, j, 4, group) + 1)
            turned = apply_rope(q, cos[at].expand(12, -1), sin[at].expand(12, -1))
            prepared_q, prepared_k = layer.prepare(turned, k, context)
            scores[:, :, i, j] = (prepared_q[:, :, i] * prepared_k[:, :, j]).sum(-1)
    weights = layer.row_weights(scores.masked_fill(~context.visible(scores), remap.HIDDEN), context)
    y = weights @ v.expand(-1, q.shape[1], -1, -1)
    if layer.definition.output_norm:
        y = torch.nn.functional.rms_norm(y, y.shape[-1:], eps=1e-5)
    y = y.transpose(1, 2).flatten(2)
    y = attention.out(y if attention.gate is None else y * torch.sigmoid(attention.gate(x)))
    result = remap.remapped_forward(attention, 4, group, x, cos, sin)
    torch.testing.assert_close(result, y, rtol=1e-4, atol=1e-5)
    unchanged = remap.remapped_forward(attention, 12, group, x, cos, sin)
    torch.testing.assert_close(unchanged, attention(x, cos, sin), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(result, unchanged, rtol=1e-2)


def test_script(tmp_path, data, call, capsys):
    run = make_run(tmp_path / "runs", "a", data)
    call(remap, run, "--near", 2, "--group", 4, "--blocks", 1, "--out", tmp_path / "grouped")
    call(remap, run, "--near", 1000, "--blocks", 1, "--out", tmp_path / "out")
    (grouped, rows) = (read_rows([tmp_path / name]) for name in ("grouped", "out"))
    assert set(grouped.rope) == {"self_extend = 2/4"} and (grouped.measure == rows.measure).all()
    is_cut = rows.measure.str.startswith("cut")
    is_long = rows.measure.str.startswith("same") & (rows.length == rows.length.max())
    assert is_cut.sum() == is_long.sum() == 1 and (rows.measure == "document").sum() == 1
    assert grouped[is_cut].value.item() == rows[is_cut].value.item()
    assert abs(grouped[is_long].value.item() - rows[is_long].value.item()) > 1e-3
    gpt = load_model(run).model
    blocks = Blocks(TokenStream(data, "val"), [int(rows.length.max())], 1)
    length = gpt.config.train.seq_len
    expected = block_losses(gpt, blocks, 0, blocks.longest, UNSCALED)[0, -length:].mean().item()
    scored = rows[(rows.length == blocks.longest) & (rows.measure == f"same_targets[{length}]")]
    assert scored.value.item() == pytest.approx(expected, abs=2e-6)
    assert set(rows.rope) == {"rerope = 1000"} and "a_remapped" in capsys.readouterr().out


def test_mistakes(tmp_path, data, call):
    run = make_run(tmp_path / "runs", "a", data)
    with one_line("--blocks 100: expected at most"):
        call(remap, run, "--near", 8, "--blocks", 100)
    centred = make_run(tmp_path / "runs", "c", data, normaliser="norm_softmax")
    with one_line("norm_softmax: expected a normaliser that does not centre the keys"):
        call(remap, centred, "--near", 8, "--blocks", 1)
    with one_line("no layer has RoPE"):
        call(
            remap,
            make_run(tmp_path / "runs", "b", data, position="none"),
            "--near",
            8,
            "--blocks",
            1,
        )
