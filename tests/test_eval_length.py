"""eval_length.py: its numbers against direct computations, its files, its refusals."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import eval_length  # noqa: E402
from config import Config, config_from_dict  # noqa: E402
from data.batches import val_batch  # noqa: E402
from data.dataset import TokenStream  # noqa: E402
from data.shards import write_shard  # noqa: E402
from infra.cli import UserError  # noqa: E402
from model import GPT, RopeKind, RopeScaling  # noqa: E402
from training.checkpoint import load_model, read_config, save_checkpoint  # noqa: E402

TRAIN_LEN, VOCAB = 16, 50
LENGTHS = [8, 16, 32, 64]
N_BLOCKS = 5


def make_run(runs: Path, name: str, data: Path, step: int = 7, **attention: object) -> Path:
    values = {
        "name": name,
        "model": {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": VOCAB},
        "attention": {"normaliser": "softmax", **attention},
        "data": {"dir": str(data)},
        "train": {"seq_len": TRAIN_LEN, "batch_tokens": 64, "micro_batch": 4, "dtype": "float32"},
        "log": {"dir": str(runs)},
    }
    config = config_from_dict(values, "test")
    torch.manual_seed(step)
    model = GPT(config)
    with torch.no_grad():  # attention as it is at init is all but uniform: it would hide wrong positions
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(10)
    save_run(runs / name, config, model, step)
    return runs / name


def save_run(folder: Path, config: Config, model: GPT, step: int, tokenizer: str = "toy") -> None:
    state = {
        "step": step,
        "config": config.model_dump(),
        "model": model.state_dict(),
        "data": {"tokenizer": tokenizer},
    }
    state |= {"optimizers": [], "validation": {}, "guard": {}, "rng": []}
    save_checkpoint(folder, state, keep_last=9)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A val split that holds N_BLOCKS blocks of 64 and a few tokens more."""
    folder = tmp_path / "data"
    folder.mkdir()
    tokens = np.random.default_rng(0).integers(0, VOCAB, N_BLOCKS * 64 + 20)
    write_shard(folder / "toy_val_000000.bin", tokens)
    info = {"format_version": 1, "dataset": "toy", "tokenizer": "toy", "vocab_size": VOCAB, "source": "test"}
    shards = [{"file": "toy_val_000000.bin", "tokens": len(tokens), "sha256": "0"}]
    (folder / "dataset.json").write_text(json.dumps(info | {"splits": {}, "shards": shards}))
    return folder


def call(monkeypatch: pytest.MonkeyPatch, *args: object) -> None:
    monkeypatch.setattr(sys, "argv", ["eval_length.py", *map(str, args), "--device", "cpu"])
    eval_length.main()


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def spawn(*args: object, processes: int = 1) -> subprocess.CompletedProcess[str]:
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command += [str(ROOT / "eval_length.py"), *map(str, args), "--device", "cpu"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)


def direct_losses(run: Path, data: Path, length: int, rope: RopeKind) -> torch.Tensor:
    """Losses of all scored tokens in stream order, (N,) float64, from full logits, window by window."""
    model = load_model(run).model
    stream, losses = TokenStream(data, "val"), []
    for window in range(N_BLOCKS * 64 // length):
        x, y = map(torch.from_numpy, val_batch(stream, window, 1, length))
        with torch.no_grad():
            logits = model(x, rope=RopeScaling(rope))[0]  # (T, V)
        losses.append(F.cross_entropy(logits.double(), y[0], reduction="none"))
    return torch.cat(losses)


@pytest.mark.parametrize("rope", ["ntk", "none", "linear", "yarn"])
@pytest.mark.parametrize(
    "attention",
    [{}, {"normaliser": "lssa", "reweight_p": 3}, {"engine": "dense"}],
    ids=["sdpa", "rows", "dense"],
)
def test_numbers_equal_direct_computation(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, attention: dict, rope: RopeKind
) -> None:
    run = make_run(tmp_path / "runs", "a", data, **attention)
    call(monkeypatch, run, "--lengths", *LENGTHS, "--rope", rope)
    result = read(run / "eval_length.json")
    assert result["data"]["tokens"] == N_BLOCKS * 64 and result["data"]["blocks"] == N_BLOCKS
    assert result["same_target_tokens"] == 8
    assert [row["length"] for row in result["lengths"]] == LENGTHS
    shortest = direct_losses(run, data, LENGTHS[0], rope).view(N_BLOCKS, 64).mean(1)
    for row in result["lengths"]:
        losses = direct_losses(run, data, row["length"], rope)
        blocks = losses.view(N_BLOCKS, 64)
        assert row["loss"] == pytest.approx(losses.mean().item(), rel=1e-5, abs=1e-6)
        assert row["perplexity"] == pytest.approx(math.exp(losses.mean()), rel=1e-5, abs=1e-6)
        assert row["stderr"] == pytest.approx(blocks.mean(1).std().item() / N_BLOCKS**0.5, rel=1e-5, abs=1e-6)
        same = blocks[:, -8:].mean(1)
        assert row["same_target_loss"] == pytest.approx(same.mean().item(), rel=1e-5, abs=1e-6)
        assert row["same_target_stderr"] == pytest.approx(
            same.std().item() / N_BLOCKS**0.5, rel=1e-5, abs=1e-6
        )
        change = blocks.mean(1) - shortest
        assert row["change"] == pytest.approx(change.mean().item(), rel=1e-5, abs=1e-6)
        assert row["change_stderr"] == pytest.approx(change.std().item() / N_BLOCKS**0.5, rel=1e-5, abs=1e-6)


def test_same_targets_have_windows_that_end_with_the_block(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the definition: the last T tokens of each block as a window of their own."""
    run = make_run(tmp_path / "runs", "a", data)
    call(monkeypatch, run, "--lengths", 16, 32, 64)
    model = load_model(run).model
    tokens = torch.from_numpy(TokenStream(data, "val").read(0, N_BLOCKS * 64 + 1))
    for row in read(run / "eval_length.json")["lengths"]:
        length, means = row["length"], []
        for end in range(64, N_BLOCKS * 64 + 1, 64):
            x, y = tokens[None, end - length : end], tokens[None, end - length + 1 : end + 1]
            losses = model.token_losses(x, y, rope=RopeScaling("ntk", length=length))
            means.append(losses[0, -TRAIN_LEN:].double().mean().item())
        assert row["same_target_loss"] == pytest.approx(np.mean(means), rel=1e-5)


def test_every_target_is_scored_once_at_each_length(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the place in the stream instead of a loss, the sums are those of the places."""
    run = make_run(tmp_path / "runs", "a", data)
    stream = TokenStream(data, "val")
    places = torch.arange(N_BLOCKS * 64 + 20, dtype=torch.float32)

    def place(
        model: GPT, stream: TokenStream, block: int, plan: eval_length.Plan, length: int
    ) -> torch.Tensor:
        n = plan.longest // length
        x, y = val_batch(stream, block * n, n, length)
        start = block * plan.longest
        np.testing.assert_array_equal(y.ravel(), stream.read(start + 1, plan.longest))
        return places[start : start + plan.longest].view(n, length)

    monkeypatch.setattr(eval_length, "block_losses", place)
    call(monkeypatch, run, "--lengths", *LENGTHS)
    result = read(run / "eval_length.json")
    assert stream.n_tokens > result["data"]["tokens"] == N_BLOCKS * 64
    for row in result["lengths"]:
        assert row["loss"] == places[: N_BLOCKS * 64].mean()
        assert row["change"] == 0 and row["change_stderr"] == 0
        n_windows = N_BLOCKS * 64 / row["length"]
        total = sum(b["loss"] * (b["to"] - b["from"]) * n_windows for b in row["buckets"])
        assert total == pytest.approx(places[: N_BLOCKS * 64].sum().item())


def test_dense_is_not_used(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "runs", "a", data, normaliser="lssa", engine="dense")

    def refuse(*_: object) -> None:
        raise AssertionError("(T, T) weights")

    monkeypatch.setattr("attention.Normaliser.weights", refuse)
    call(monkeypatch, run)


def test_buckets(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert eval_length.bucket_edges(64) == [0, 64]
    assert eval_length.bucket_edges(128) == [0, 128]
    assert eval_length.bucket_edges(1000) == [0, 128, 256, 512, 1000]
    assert eval_length.bucket_edges(1024) == [0, 128, 256, 512, 1024]
    monkeypatch.setattr(eval_length, "FIRST_BUCKET", 8)
    run = make_run(tmp_path / "runs", "a", data)
    call(monkeypatch, run, "--lengths", 32, 64)
    for row in read(run / "eval_length.json")["lengths"]:
        by_position = direct_losses(run, data, row["length"], "ntk").view(-1, row["length"]).mean(0)
        for bucket in row["buckets"]:
            expected = by_position[bucket["from"] : bucket["to"]].mean().item()
            assert bucket["loss"] == pytest.approx(expected, rel=1e-5)
        assert row["buckets"][-1]["to"] == row["length"]


def test_per_position(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of the longest window, with errors over its blocks; their mean is the loss."""
    assert eval_length.part_edges(20000)[:3] == [0, 200, 400] and eval_length.part_edges(20000)[-1] == 20000
    monkeypatch.setattr(eval_length, "POSITION_PARTS", 6)  # 64 does not divide: parts of 10 and 11
    runs = tmp_path / "runs"
    a, b = make_run(runs, "a", data), make_run(runs, "b", data, normaliser="ssmax_pn")
    call(monkeypatch, a, b, "--lengths", 32, 64, "--per-position")
    by_block = direct_losses(a, data, 64, "ntk").view(N_BLOCKS, 64)
    short, long = read(a / "eval_length.json")["lengths"]
    assert "positions" not in short and len(long["positions"]) == 6
    for part in long["positions"]:
        means = by_block[:, part["from"] : part["to"]].mean(1)
        assert part["loss"] == pytest.approx(means.mean().item(), rel=1e-5)
        assert part["stderr"] == pytest.approx(means.std().item() / N_BLOCKS**0.5, rel=1e-5)
    total = sum(part["loss"] * (part["to"] - part["from"]) for part in long["positions"])
    assert total / 64 == pytest.approx(long["loss"])
    for folder in (a, runs):
        assert (folder / "eval_length_position.png").read_bytes().startswith(b"\x89PNG")
    assert not (b / "eval_length_position.png").exists()  # it was refused there


def test_configs_are_read_without_tensors(tmp_path: Path, data: Path) -> None:
    """What checks all runs first does not read their gigabytes; what loads a model sees every damage."""
    run = make_run(tmp_path / "runs", "a", data)
    path = run / "checkpoints" / "step_000007.pt"
    whole = path.read_bytes()
    weights = load_model(run).model.state_dict()["final_norm.weight"].numpy().tobytes()
    at = whole.index(weights)
    path.write_bytes(whole[:at] + bytes(4) + whole[at + 4 :])
    assert read_config(run).name == "a"
    with pytest.raises(UserError, match="none of the 1 checkpoints loads"):
        load_model(run)


def test_several_runs_defaults_and_refused_lengths(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    a, b = make_run(runs, "a", data), make_run(runs, "b", data, normaliser="ssmax_pn")
    call(monkeypatch, a, b)
    assert [row["length"] for row in read(a / "eval_length.json")["lengths"]] == [16, 32, 64, 128, 256]
    refused = read(b / "eval_length.json")["lengths"]
    assert [row["reason"] is None for row in refused] == [True, False, False, False, False]
    assert "loss" in refused[0] and "loss" not in refused[1]
    for picture in (a / "eval_length.png", b / "eval_length.png", runs / "eval_length.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.rglob("*.tmp"))
    out = capsys.readouterr().out
    assert "b at 32: no result:" in out and "±-" in out  # 256 fits once: one block has no standard error
    assert (
        len({line.index("step") for line in out.splitlines() if line.startswith("run ") and "step" in line})
        == 1
    )


def test_one_checkpoint_file(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "runs", "a", data, step=7)
    make_run(tmp_path / "runs", "a", data, step=9)
    old, new = run / "checkpoints" / "step_000007.pt", run / "checkpoints" / "step_000009.pt"
    call(monkeypatch, old, new, run, "--lengths", 16, 32)
    results = [read(run / f"eval_length{name}.json") for name in ("_step_000007", "_step_000009", "")]
    assert [result["step"] for result in results] == [7, 9, 9]
    assert results[0]["lengths"] != results[1]["lengths"] == results[2]["lengths"]
    assert (run / "eval_length_all.png").exists()
    alone = tmp_path / "alone.pt"
    alone.write_bytes(old.read_bytes())
    call(monkeypatch, alone, "--lengths", 16, "--out", tmp_path / "curve.svg")
    assert (tmp_path / "eval_length_alone.json").exists() and (tmp_path / "curve.svg").exists()


def test_a_tag_is_part_of_the_names(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = tmp_path / "runs"
    a, b = make_run(runs, "a", data), make_run(runs, "b", data)
    call(monkeypatch, a, b / "checkpoints" / "step_000007.pt", "--lengths", 16, "--tag", "none")
    assert (a / "eval_length_none.json").exists() and (b / "eval_length_none_step_000007.png").exists()
    assert (runs / "eval_length_none.png").exists() and not (a / "eval_length.json").exists()


def test_a_loss_that_is_not_finite_is_said(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "runs", "a", data)
    model, config, step, _ = load_model(run)
    with torch.no_grad():
        model.get_parameter("final_norm.weight").fill_(math.nan)
    save_run(run, config, model, step)
    call(monkeypatch, run, "--lengths", 16, 32)
    rows = read(run / "eval_length.json")["lengths"]
    assert [row["reason"] for row in rows] == ["the loss is not finite"] * 2
    assert "a at 16: no result: the loss is not finite" in capsys.readouterr().out


def test_processes_change_nothing(tmp_path: Path, data: Path) -> None:
    """Two processes that share 5 blocks; and a length that is refused, at which they must not hang."""
    a = make_run(tmp_path / "runs", "a", data, normaliser="lssa", reweight_p=15)
    b = make_run(tmp_path / "runs", "b", data, normaliser="ssmax_pn")
    texts, rows = [], []
    for processes in (1, 2):
        done = spawn(a, b, "--lengths", 16, 64, processes=processes)
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout)
        rows.append([read(run / "eval_length.json")["lengths"] for run in (a, b)])
    assert texts[0] == texts[1]
    for one, two in zip(*rows, strict=True):
        for x, y in zip(one, two, strict=True):
            assert x.keys() == y.keys() and x["reason"] == y["reason"]
            for key in x.keys() - {"buckets", "reason"}:
                assert x[key] == pytest.approx(y[key], abs=1e-6)


def test_exit_status_and_one_line(tmp_path: Path) -> None:
    done = spawn(tmp_path / "none")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "args, message",
    [
        (["{tmp}/none"], "no such run folder or checkpoint"),
        (["{tmp}/empty"], "no checkpoint in"),
        (["{tmp}/bad.pt"], "bad.pt"),
        ([], "RUN"),
        (["{run}", "{run}"], "given twice"),
        (["{run}", "--lengths", "16", "512"], "at least 513 for one window of length 512"),
        (["{run}", "--lengths", "32", "--tokens", "31"], "at least one window of 32"),
        (["{run}", "--lengths", "24", "64"], "24 does not divide the longest"),
        (["{run}", "--lengths", "0"], "'0': expected a whole number"),
        (["{run}", "--lengths", "1e3"], "'1e3': expected a whole number"),
        (["{run}", "--rope", "theta"], "needs --rope-theta"),
        (["{run}", "--rope", "theta", "--rope-theta", "-1"], "expected a positive number"),
        (["{run}", "--rope-theta", "500000"], "only read by kind theta"),
        (["{run}", "--rope", "alibi"], "invalid choice"),
        (["{run}", "--data", "{tmp}/none"], "no such data folder"),
        (["{run}", "--data", "{tmp}/gpt2"], "tokenised with 50257 tokens"),
        (["{run}", "--tag", "a/b"], "--tag a/b: expected letters"),
        (["{run}", "--out", "curve.txt"], "ends in .png"),
        (["{run}", "--out", "{tmp}/none/curve.png"], "no folder"),
    ],
)
def test_bad_input(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], message: str
) -> None:
    run = make_run(tmp_path / "runs", "a", data)
    (tmp_path / "empty").mkdir()
    whole = (run / "checkpoints" / "step_000007.pt").read_bytes()
    (tmp_path / "bad.pt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "gpt2").mkdir()
    write_shard(tmp_path / "gpt2" / "toy_val_000000.bin", np.zeros(999, dtype=np.int64))
    with pytest.raises(UserError) as raised:
        call(monkeypatch, *(arg.format(tmp=tmp_path, run=run) for arg in args))
    assert message in str(raised.value) and "\n" not in str(raised.value)
    assert not (run / "eval_length.json").exists()
