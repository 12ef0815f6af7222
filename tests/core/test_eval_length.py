"""eval_length.py: numbers against direct computations, sets of rows, rejected lengths and input."""

import json
import math
import shutil
import tomllib
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import TINY, VOCAB, make_dataset, one_line, save_run, slow, write_dataset, write_shard
from launch import finish, fork_ranks
from torch.nn import functional as F

import eval_length
import evaluation
import measure
from config import config_from_dict
from data.batches import read_windows
from data.dataset import TokenStream
from evaluation import GPTScorer, Run, open_blocks
from infra.cli import UserError
from infra.distributed import World
from model import GPT
from positions import UNSCALED, RopeScaling
from training.checkpoint import load_model, read_config

LENGTHS = [8, 16, 32, 64]
N_BLOCKS = 5
N_SCORED = N_BLOCKS * 64


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A val split of N_BLOCKS blocks of 64 and a few tokens more."""
    return make_dataset(
        tmp_path_factory.mktemp("blocks") / "data", n_val=N_SCORED + 20, n_train=100
    )


def make_run(
    runs,
    name,
    data,
    step=7,
    position="rope",
    seed=1337,
    **attention,
):
    values = tomllib.loads(TINY.format(vocab=VOCAB, data=data, runs=runs))
    values["model"]["position"] = position
    values |= {"name": name, "seed": seed, "attention": attention}
    config = config_from_dict(values, "test")
    torch.manual_seed(step + seed)
    model = GPT(config)
    with torch.no_grad():  # at init attention is almost uniform, which would hide wrong positions
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(10)
    return save_run(runs / name, config, model, step)


@pytest.fixture
def evaluate(call, monkeypatch):
    """Without figures, which take as long as the losses."""
    monkeypatch.setattr(measure, "draw_curves", lambda path, *args: path.touch())
    return partial(call, eval_length, "--device", "cpu")


def read(run, **values):
    return measure.select(measure.read_rows(run), **values)


def values_of(run, **values):
    return read(run, **values)["value"].tolist()


def close(expected):
    return pytest.approx(expected, rel=1e-5, abs=1e-6)


def direct_losses(run, data, length, rope):
    """Losses of all scored tokens in stream order, (N,) float64, from full logits, window by
    window.
    """
    model = load_model(run).model
    stream = TokenStream(data, "val")
    losses = []
    for window in range(N_SCORED // length):
        x, y = map(torch.from_numpy, read_windows(stream, window, 1, length))
        with torch.no_grad():
            logits = model(x, rope=RopeScaling(rope))[0]  # (T, V)
        losses.append(F.cross_entropy(logits.double(), y[0], reduction="none"))
    return torch.cat(losses)


@pytest.mark.parametrize(
    "attention", [*slow({}), {"normaliser": "lssa", "reweight_p": 3}], ids=["sdpa", "rows"]
)
def test_numbers_equal_direct_computation(tmp_path, data, evaluate, monkeypatch, attention):
    """Both measures and the positions, at three scalings at once."""
    run = make_run(tmp_path / "runs", "a", data, **attention)
    scalings = ["none", "ntk", "yarn"]
    monkeypatch.setattr(eval_length, "N_PARTS", 4)
    options = ["--window", 0, "--all-tokens", "--by-position", "--rope", *scalings]
    with monkeypatch.context() as patch:  # weights of (T, T) are never computed
        patch.delattr("normalisers.layer.NormaliserLayer.weights")
        evaluate(run, "--lengths", *LENGTHS, *options)
    for scaling in scalings:
        for length in LENGTHS:
            blocks = direct_losses(run, data, length, scaling).view(N_BLOCKS, 64)
            where = {"scaling": scaling, "length": length, "window": 0}
            assert values_of(run, measure="loss", **where) == close(blocks.mean(1).tolist())
            same = values_of(run, measure="same_targets", **where)
            assert same == close(blocks[:, -8:].mean(1).tolist())
        parts = [f"loss[{i}:{i + 16}]" for i in range(0, 64, 16)]
        for part, expected in zip(parts, blocks.view(N_BLOCKS, 4, 16).mean((0, 2)), strict=True):
            assert values_of(run, measure=part, scaling=scaling) == [close(expected.item())]
    every = read(run, measure="same_targets", scaling="none")["value"]
    evaluate(run, "--lengths", *LENGTHS, "--window", 0, "--rope", "none")  # of last windows alone
    alone = read(run, measure="same_targets", scaling="none")["value"]
    np.testing.assert_allclose(alone, every, rtol=1e-5)


@pytest.mark.parametrize("context, n_same", [(8, 8), (8, 64), (16, 20), (64, 8)])
@pytest.mark.parametrize("strides", [4, *slow(8, 3)], ids=["even", "exact", "ragged"])
def test_windows_computed_anew(tmp_path, data, monkeypatch, context, n_same, strides):
    """A forward pass for each target; a window that moves by 1 shows it exactly its last 8 tokens."""
    monkeypatch.setattr(eval_length, "STRIDES", strides)
    model = load_model(make_run(tmp_path / "runs", "a", data)).model
    tokens = torch.from_numpy(TokenStream(data, "val").read(0, 65))
    x, y = tokens[:-1], tokens[1:]
    losses = eval_length.recomputed_losses(GPTScorer(model), tokens, context, n_same)
    stride = math.ceil(context / strides)
    for i in range(64 - n_same, 64):
        end = 63 - (63 - i) // stride * stride  # of the window that scores target i
        start = max(0, end + 1 - context)
        with torch.no_grad():
            logits = model(x[None, start : i + 1])[0, -1].double()
        expected = F.cross_entropy(logits, y[i])
        assert losses[i - 64 + n_same].item() == close(expected.item())


def test_rolling_windows_are_asked_of_the_model(tmp_path, data, evaluate, monkeypatch):
    """Unscaled, with the training length by default; a window that reaches all keys has no effect."""
    run = make_run(tmp_path / "runs", "a", data)
    asked = []

    def losses(model, x, y, *, rope=UNSCALED, chunk):
        asked.append((x.shape[1], model.windows[0], rope.name))
        return torch.full(y.shape, 1.0 + model.windows[0])

    monkeypatch.setattr(GPT, "token_losses", losses)
    evaluate(run, "--lengths", 16, 64, "--window", 8, 16)
    windowed = {each for each in asked if each[1]}
    assert windowed == {(16, 8, "none"), (64, 8, "none"), (64, 16, "none")}
    assert read(run)["window"].unique().tolist() == ["8", "16", "0"]
    assert values_of(run, window=16) == [1.0] * N_BLOCKS + [17.0] * N_BLOCKS
    evaluate(run, "--lengths", 16, 64, "--recomputed")
    assert {*read(run)["window"]} == {"0", "8", "16", "16 recomputed"}
    assert read(run, window="16 recomputed")["length"].tolist() == [64] * N_BLOCKS


def test_blocks_stand_at_the_ends_of_documents(tmp_path):
    """One each; where few are that long consecutive blocks, with the last document begun."""
    tokens = [256, 1, 2, 3, 256, 4, 256, 5, 6, 7, 8, 9]
    stream = TokenStream(write_dataset(tmp_path / "a", {"val": tokens}, 10**6), "val")
    blocks = open_blocks(stream, 4, 100)
    assert (blocks.starts, blocks.documents) == ([0, 4], [0, 2])
    tokens = [256, 1, 2, 3, 4, 256, 256, 5, 6, 7, 8, 9]
    stream = TokenStream(write_dataset(tmp_path / "b", {"val": tokens}, 10**6), "val")
    blocks = open_blocks(stream, 4, 100)
    assert (blocks.starts, blocks.documents) == ([0, 7], [0, 2])
    assert stream.read(blocks.starts[1] + 1, 4).tolist() == [6, 7, 8, 9]
    assert len(open_blocks(stream, 4, 7)) == 1


def test_a_test_split_is_scored_if_there_is_one(tmp_path, data, evaluate):
    held_out = {split: np.arange(300) % VOCAB for split in ("train", "val", "test")}
    held_out["test"] = held_out["test"][::-1]
    folder = write_dataset(tmp_path / "data", held_out, 10**6, VOCAB)
    run = make_run(tmp_path / "runs", "a", folder)
    texts = {split: TokenStream(folder, split).fingerprint[7:19] for split in ("val", "test")}
    evaluate(run, "--lengths", 16, 64)
    assert read(run)["text"].unique().tolist() == [texts["test"]]
    evaluate(run, "--lengths", 16, 64, "--split", "val")
    assert {*read(run)["text"]} == {*texts.values()}


def test_table_of_several_runs(tmp_path, data, evaluate, capsys):
    """Differences to the first run's rolling window; seeds of one model are one line; 80 columns."""
    runs = tmp_path / "runs"
    a = make_run(runs, "a", data)
    seeds = [
        make_run(runs, f"b_seed={seed}", data, seed=seed, normaliser="lssa", reweight_p=3)
        for seed in (1, 2)
    ]
    evaluate(a, *seeds)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert (
        "the last 16 tokens of 1 blocks (1 documents)" in out and "Minus softmax, window 16" in out
    )
    assert "LSSAR, 2 seeds" in out and (runs / "eval_length.png").exists()
    evaluate(a, *seeds, "--lengths", 16, 64)
    lines = capsys.readouterr().out.split("Minus")[1].splitlines()[2:]
    ntk = {"window": 0, "scaling": "ntk", "length": 64}
    both = measure.read_losses(pd.concat(read(run, **ntk) for run in seeds))
    zero = measure.read_losses(read(a, window=16, length=64))
    assert both is not None and zero is not None and both.values.shape == (2, N_BLOCKS)
    found = measure.format_difference(measure.estimate(both, zero))
    assert lines[0].split() == ["context", "16", "64"]
    assert lines[-1].startswith("  NTK ") and lines[-1].endswith(found)
    before = (a / "rows.csv").read_bytes()
    evaluate(a, *seeds, "--lengths", 16, 64, "--draw")  # the same, from rows
    assert capsys.readouterr().out.split("Minus")[1].splitlines()[2:] == lines
    assert (a / "rows.csv").read_bytes() == before


def test_missing_rows_alone_are_measured(tmp_path, data, evaluate, monkeypatch):
    """Of runs without all blocks, settings and lengths of this call."""
    a, b = (make_run(tmp_path / "runs", name, data) for name in "ab")
    options = ["--lengths", 16, 64, "--window", 0, "--missing"]
    loaded = []
    load = Run.load
    monkeypatch.setattr(Run, "load", lambda run, world: loaded.append(run.name) or load(run, world))
    for given, expected in (
        ([a, *options], "a"), ([a, b, *options], "b"), ([a, b, *options], ""),
        ([a, b, *options, "--tokens", 128], "ab"), ([a, b, *options], "ab"),
        ([a, *options, "--rope", "yarn"], "a"), ([a, *options, "--all-tokens"], "a"),
        ([a, *options, "--by-position"], "a"), ([a, *options, "--recomputed", "--window", 8], "a"),
        ([a, *options, "--recomputed", "--window", 8], ""), ([a, *options, "--lengths", 32, 64], "a"),
    ):  # fmt: skip
        loaded.clear()
        evaluate(*given)
        assert "".join(loaded) == expected, given
    rows = measure.read_rows(a)
    assert eval_length.is_measured([str(a), "--lengths", "32", "64", "--window", "0"])
    measure.write_rows(a, rows[(rows["block"] != 4)])
    assert not eval_length.is_measured([str(a), "--lengths", "32", "64", "--window", "0"])


def test_several_runs_defaults_and_rejected_lengths(tmp_path, data, call, capsys):
    runs = tmp_path / "runs"
    a = make_run(runs, "a", data)
    b = make_run(runs, "b", data, position="none", normaliser="ssmax_pn")
    call(eval_length, a, b, "--device", "cpu", "--window", 0, "--by-position")  # which draws
    assert [sorted({*read(run)["scaling"]}) for run in (a, b)] == [["none", "ntk"], ["none"]]
    rows = read(b, measure="same_targets")
    assert rows["length"].tolist() == [16, 32, 64, 128, 256]
    assert rows["value"].isna().tolist() == [False, True, True, True, True]
    for name in ("eval_length", "eval_length_by_position"):
        assert (runs / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.rglob("*.tmp"))
    out = capsys.readouterr().out
    assert "ssmax-pn, NoPE, unscaled, at 32: no result:" in out


def test_configs_are_read_without_tensors(tmp_path, data):
    """The check of all runs before the first does not read their gigabytes; loading a model does."""
    run = make_run(tmp_path / "runs", "a", data)
    path = run / "checkpoints" / "step_000007.pt"
    whole = path.read_bytes()
    weights = load_model(run).model.state_dict()["final_norm.weight"].numpy().tobytes()
    at = whole.index(weights)
    path.write_bytes(whole[:at] + bytes(4) + whole[at + 4 :])
    assert read_config(run)[0].name == "a"
    with pytest.raises(UserError, match="none of the 1 checkpoints loads"):
        load_model(run)


def test_a_finished_run_is_written_before_the_next_fails(tmp_path, data, evaluate, monkeypatch):
    a, b = (make_run(tmp_path / "runs", name, data) for name in "ab")
    load = Run.load

    def fail(run, world):
        if run.name == "b":
            raise UserError("b fails")
        return load(run, world)

    monkeypatch.setattr(Run, "load", fail)
    with pytest.raises(UserError, match="b fails"):
        evaluate(a, b, "--lengths", 16)
    assert (a / "rows.csv").exists() and not (b / "rows.csv").exists()


def test_a_foreign_table_stops_before_the_work(tmp_path, data, evaluate):
    a, b = (make_run(tmp_path / "runs", name, data) for name in "ab")
    (b / "rows.csv").write_text("x,y\n1,2\n")
    with one_line("b/rows.csv: expected rows with run, step"):
        evaluate(a, b)
    assert not (a / "rows.csv").exists()


def test_checkpoint_files(tmp_path, data, evaluate, capsys):
    """Each has the rows of its step, in the run's folder; a lone file's are beside it."""
    runs = tmp_path / "runs"
    run = make_run(runs, "a", data, step=7)
    make_run(runs, "a", data, step=9)
    old = run / "checkpoints" / "step_000007.pt"
    evaluate(old, run, "--lengths", 16, 32)
    assert "a: step 7, 2 layers of 32, batches of 128 tokens, T = 16\n" in capsys.readouterr().out
    assert {*read(run)["step"]} == {7, 9}
    assert values_of(run, step=7) != values_of(run, step=9)
    alone = tmp_path / "alone.pt"
    alone.write_bytes(old.read_bytes())
    evaluate(alone, "--lengths", 16, 32)
    assert (tmp_path / "eval_length_alone.png").exists()
    assert values_of(tmp_path) == values_of(run, step=7)


def test_ranks_that_read_different_checkpoints_do_not_evaluate(
    tmp_path, data, evaluate, monkeypatch
):
    run = make_run(tmp_path / "runs", "a", data)
    monkeypatch.setattr(World, "gather_objects", lambda world, value: [value, 9])
    with one_line(run, "got a new checkpoint while it was read"):
        evaluate(run, "--lengths", 16)


def test_a_loss_that_is_not_finite(tmp_path, data, evaluate, capsys):
    run = make_run(tmp_path / "runs", "a", data)
    model, config, step, *_ = load_model(run)
    with torch.no_grad():
        model.get_parameter("final_norm.weight").fill_(math.nan)
    save_run(run, config, model, step)
    evaluate(run, "--lengths", 16)
    out = capsys.readouterr().out
    assert "softmax, NTK, at 16: no result: the model computed NaN or infinity" in out
    assert read(run)["value"].isna().all()


def test_the_number_of_ranks_changes_nothing(tmp_path, data, evaluate, capsys):
    """Two ranks share 5 blocks; they must not hang at a rejected length."""
    a = make_run(tmp_path / "runs", "a", data, normaliser="lssa", reweight_p=15)
    b = make_run(tmp_path / "runs", "b", data, normaliser="ssmax_pn")
    args = (a, b, "--lengths", 16, 64, "--window", 0)
    evaluate(*args)
    one = [read(run) for run in (a, b)]
    output = finish(fork_ranks(eval_length.main, *args, "--device", "cpu"))
    assert output[0][0] == capsys.readouterr().out
    for run, before in zip((a, b), one, strict=True):
        pd.testing.assert_frame_equal(read(run), before, rtol=1e-5)


@pytest.mark.parametrize(
    "args, message",
    [
        # before the first is evaluated
        (["{run}", "{tmp}/none"], "none: no readable checkpoint"),
        (["{tmp}/empty"], "no checkpoint in"),
        (["{run}", "--lengths", "16", "512"], "at least 513 for one window of length 512"),
        (["{run}", "--lengths", "32", "--tokens", "31"], "--tokens 31: expected at least 32"),
        (["{run}", "--lengths", "24", "64"], "24 does not divide the longest"),
        (
            ["{run}", "--rope", "theta"],
            "RoPE scaling theta: expected none, ntk, yarn or theta=500000",
        ),
        (["{run}", "--rope", "ntk=3"], "RoPE scaling ntk=3: expected none, ntk"),
        (["{run}", "--window", "-1"], "'-1': expected an integer, at least 0"),
        (["{run}", "--data", "{tmp}/gpt2"], "tokenised with 50257 tokens"),
        (["{run}", "--data", "{tmp}/gone"], "gone: no such data folder; prepare it with"),
        (["{run}", "--draw"], "no rows of step 7: expected a call without --draw"),
        (["{run}", "--out", "{tmp}/none/curve.png"], "in a folder that exists"),
    ],
)
def test_bad_input(tmp_path, data, evaluate, args, message):
    run = make_run(tmp_path / "runs", "a", data)
    (tmp_path / "empty").mkdir()
    (tmp_path / "gpt2").mkdir()
    write_shard(tmp_path / "gpt2" / "toy_val_000000.bin", np.zeros(999, dtype=np.int64))
    with one_line(message):
        evaluate(*(arg.format(tmp=tmp_path, run=run) for arg in args))
    assert not (run / "rows.csv").exists()


def test_runs_of_several_texts_or_tokenisers_are_refused(tmp_path, data, evaluate, monkeypatch):
    other = make_dataset(tmp_path / "other", n_val=N_SCORED, n_train=100)
    runs = [
        make_run(tmp_path / "runs", name, folder) for name, folder in (("a", data), ("b", other))
    ]
    with one_line("runs/b: ", "is another text than"):
        evaluate(*runs, "--lengths", "8", "64")
    info = json.loads((other / "dataset.json").read_text())
    shutil.rmtree(other)
    shutil.copytree(data, other)
    (other / "dataset.json").write_text(json.dumps(info | {"tokenizer": "another"}))
    names = {"a": "bytes", "b": "another"}
    monkeypatch.setattr(
        evaluation, "read_config", lambda source: (read_config(source)[0], names[source.name])
    )
    with one_line("b: tokens of another: expected bytes, as", "a has"):
        evaluate(*runs, "--lengths", "8", "64")


def test_progress_is_lines_of_a_log(capsys, monkeypatch):
    monkeypatch.setattr(evaluation, "LOG_SECONDS", 0.0)
    assert [*evaluation.progress(range(3), "softmax")] == [0, 1, 2]
    lines = capsys.readouterr().err.split("\n")
    assert lines[1].strip() == "softmax: 1/3, 00:00 left"
    assert [*evaluation.progress(range(3), "softmax", is_shown=False)] == [0, 1, 2]
    assert not capsys.readouterr().err
