"""eval_length.py: numbers against direct computations, files, rejected lengths and input."""

import json
import math
import shutil
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import TINY, VOCAB, make_dataset, one_line, save_run, slow, write_dataset, write_shard
from launch import finish, fork_ranks
from torch.nn import functional as F

import eval_length
from config import config_from_dict
from data.batches import read_windows
from data.dataset import TokenStream
from evals import common
from evals.common import Blocks, EvaluatedRun
from evals.output import format_stderr
from evals.rows import FILE, Row
from infra.cli import UserError
from infra.distributed import World
from model import GPT
from positions import RopeKind, RopeScaling
from training.checkpoint import load_model, read_config

LENGTHS = [8, 16, 32, 64]
N_BLOCKS = 5
N_SCORED = N_BLOCKS * 64


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A val split of N_BLOCKS blocks of 64 and a few tokens more."""
    return make_dataset(
        tmp_path_factory.mktemp("blocks") / "data", n_val=N_SCORED + 20, n_train=100
    )


def make_run(
    runs: Path, name: str, data: Path, step: int = 7, position: str = "rope", **attention: object
) -> Path:
    values = tomllib.loads(TINY.format(vocab=VOCAB, data=data, runs=runs))
    values["model"]["position"] = position
    config = config_from_dict(values | {"name": name, "attention": attention}, "test")
    torch.manual_seed(step)
    model = GPT(config)
    with torch.no_grad():  # at init attention is almost uniform, which would hide wrong positions
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(10)
    return save_run(runs / name, config, model, step)


@pytest.fixture
def evaluate(call, monkeypatch) -> Callable[..., None]:
    """Without figures, which take as long as the losses."""
    monkeypatch.setattr(eval_length, "plot", lambda results, path: path.touch())
    return partial(call, eval_length, "--device", "cpu")


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def lengths_of(run: Path) -> list[dict]:
    return read(run / "eval_length.json")["lengths"]


def close(expected: float) -> object:
    return pytest.approx(expected, rel=1e-5, abs=1e-6)


def mean_and_error(values: torch.Tensor) -> tuple[object, object]:
    return close(values.mean().item()), close(values.std().item() / len(values) ** 0.5)


def direct_losses(run: Path, data: Path, length: int, rope: RopeKind) -> torch.Tensor:
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


@pytest.mark.parametrize("rope", ["ntk", "none", "yarn"])
@pytest.mark.parametrize(
    "attention", [*slow({}), {"normaliser": "lssa", "reweight_p": 3}], ids=["sdpa", "rows"]
)
def test_numbers_equal_direct_computation(tmp_path, data, evaluate, monkeypatch, attention, rope):
    run = make_run(tmp_path / "runs", "a", data, **attention)
    with monkeypatch.context() as patch:  # weights of (T, T) are never computed
        patch.delattr("normalisers.layer.NormaliserLayer.weights")
        evaluate(run, "--lengths", *LENGTHS, "--rope", rope)
    result = read(run / "eval_length.json")
    assert result["data"]["tokens"] == N_SCORED and result["data"]["blocks"] == N_BLOCKS
    assert result["same_target_tokens"] == 8
    assert [row["length"] for row in result["lengths"]] == LENGTHS
    for row in result["lengths"]:
        blocks = direct_losses(run, data, row["length"], rope).view(N_BLOCKS, 64)
        assert (row["loss"], row["stderr"]) == mean_and_error(blocks.mean(1))
        assert (row["same_target_loss"], row["same_target_stderr"]) == mean_and_error(
            blocks[:, -8:].mean(1)
        )


@pytest.mark.parametrize("strides", [*slow(8, 4), 3], ids=["exact", "even", "ragged"])
def test_cut_and_gain_equal_direct_computation(tmp_path, data, evaluate, monkeypatch, strides):
    """A forward pass for each target; a window that moves by 1 shows it exactly its last 8 tokens."""
    run = make_run(tmp_path / "runs", "a", data)
    assert eval_length.CUT_STRIDES == 4
    monkeypatch.setattr(eval_length, "CUT_STRIDES", strides)
    monkeypatch.setattr(eval_length, "FIRST_BUCKET", 8)
    evaluate(run, "--lengths", *LENGTHS)
    result = read(run / "eval_length.json")
    stride = math.ceil(8 / strides)
    model = load_model(run).model
    stream = TokenStream(data, "val")
    cut = torch.empty(N_BLOCKS, 64, dtype=torch.float64)
    for block in range(N_BLOCKS):
        tokens = torch.from_numpy(stream.read(64 * block, 65)).long()
        for i in range(64):
            start = min(stride * math.ceil(max(0, i + 1 - 8) / stride), 64 - 8)
            if i >= 64 - stride:
                start = 64 - 8
            with torch.no_grad():
                logits = model(tokens[None, start : i + 1])[0, -1].double()
            cut[block, i] = F.cross_entropy(logits, tokens[i + 1])
    entry = result["cut"]
    assert entry["length"] == 8
    assert (entry["loss"], entry["stderr"]) == mean_and_error(cut.mean(1))
    same_targets = cut[:, -8:].mean(1)
    assert (entry["same_target_loss"], entry["same_target_stderr"]) == mean_and_error(same_targets)
    for row in result["lengths"]:
        blocks = direct_losses(run, data, row["length"], "ntk").view(N_BLOCKS, 64)
        gains = (same_targets - blocks[:, -8:].mean(1)).numpy()
        assert (row["gain"], row["gain_stderr"]) == (
            close(gains.mean()),
            close(gains.std(ddof=1) / 5**0.5),
        )
    for bucket in result["lengths"][-1]["buckets"]:
        part = slice(bucket["from"], bucket["to"])
        gains = (cut[:, part].mean(1) - blocks[:, part].mean(1)).numpy()
        expected = close(gains.mean()), close(gains.std(ddof=1) / 5**0.5)
        assert (bucket["gain"], bucket["gain_stderr"]) == expected
    assert not any("gain" in bucket for row in result["lengths"][:-1] for bucket in row["buckets"])


def test_every_target_is_scored_once_at_each_length(tmp_path, data, evaluate, monkeypatch):
    """With the position in the stream as its loss, sums are those of positions."""
    run = make_run(tmp_path / "runs", "a", data)
    positions = torch.arange(N_SCORED, dtype=torch.float32)

    def position(
        model: GPT, blocks: Blocks, block: int, length: int, rope: RopeScaling
    ) -> torch.Tensor:
        n = blocks.longest // length
        start = block * blocks.longest
        x, y = read_windows(blocks.stream, block * n, n, length)
        np.testing.assert_array_equal(y.ravel(), blocks.stream.read(start + 1, blocks.longest))
        return positions[start : start + blocks.longest].view(n, length)

    monkeypatch.setattr(eval_length, "block_losses", position)
    evaluate(run, "--lengths", *LENGTHS)
    result = read(run / "eval_length.json")
    assert TokenStream(data, "val").n_tokens > result["data"]["tokens"] == N_SCORED
    for row in result["lengths"]:
        assert row["loss"] == positions.mean()
        n_windows = N_SCORED / row["length"]
        total = sum(b["loss"] * (b["to"] - b["from"]) * n_windows for b in row["buckets"])
        assert total == pytest.approx(positions.sum().item())


def test_results_of_other_options_are_kept(tmp_path, data, evaluate, capsys):
    """Every option that changes the numbers; the same options, or --replace, write again."""
    a, b = (make_run(tmp_path / "runs", name, data) for name in "ab")
    report = tmp_path / "runs/report"
    report.mkdir()
    evaluate(a, b, report, "--lengths", 16, 64)
    assert f"skipped: {report} has no checkpoint\n" in capsys.readouterr().out
    before = (a / "eval_length.json").read_bytes()
    other_data = make_dataset(tmp_path / "other", n_val=N_SCORED + 20, n_train=100)
    for options, has in (
        (["--lengths", 32, 64], "lengths = [16, 64]"),
        (["--lengths", 16, 64, "--tokens", 64], "tokens = 1048576"),
        (["--lengths", 16, 64, "--rope", "none"], "rope = ntk"),
        (
            ["--lengths", 16, 64, "--rope", "theta", "--rope-theta", 5e3],
            "rope = ntk, rope_theta = None",
        ),
        (["--lengths", 16, 64, "--data", other_data], f"data = {data}"),
    ):
        with one_line(f"a/eval_length.json: has {has}: expected a --tag"):
            evaluate(a, "--tag", "x", *options, "--replace")
            evaluate(a, *options)
        assert (a / "eval_length.json").read_bytes() == before
    evaluate(a, "--lengths", 16, 64)
    assert lengths_of(a) == json.loads(before)["lengths"]
    evaluate(a, "--lengths", 32, 64, "--replace")
    assert [row["length"] for row in lengths_of(a)] == [32, 64]


def test_skipped_text(tmp_path, data, evaluate):
    """--skip leaves out whole blocks; the others keep their losses."""
    run = make_run(tmp_path / "runs", "a", data)
    evaluate(run, "--lengths", 16, 64)
    evaluate(run, "--lengths", 16, 64, "--skip", 33, "--tokens", 64, "--tag", "rest")
    rest = read(run / "eval_length_rest.json")
    assert [rest["data"][key] for key in ("skipped_tokens", "tokens", "blocks")] == [64, 64, 1]
    for whole, part in zip(lengths_of(run), rest["lengths"], strict=True):
        assert part["block_losses"] == whole["block_losses"][1:2]
    cut = read(run / "eval_length.json")["cut"]["block_same_target_losses"]
    assert rest["cut"]["block_same_target_losses"] == cut[1:2]


def test_documents_are_counted_to_each_blocks_end(tmp_path):
    """From the first scored block on. Blocks within one document share its number."""
    tokens = [256, 1, 2, 3, 4, 256, 256, 5, 6, 7, 8, 9]
    stream = TokenStream(write_dataset(tmp_path, {"val": tokens}, 10**6), "val")
    assert Blocks(stream, [2, 4], 3).count_documents() == [1, 3, 3]
    assert Blocks(stream, [2, 4], 2, n_skipped=1).count_documents() == [2, 2]


def test_tables_print_what_the_file_has(tmp_path, data, evaluate, capsys):
    run = make_run(tmp_path / "runs", "a", data)
    evaluate(run, "--lengths", 16, 64)
    tables = capsys.readouterr().out.split("\n\n")[3::2]
    entry = lengths_of(run)[-1]
    (bucket,) = entry["buckets"]
    same = (entry, "same_target_loss", "same_target_stderr")
    gains = [(each, "gain", "gain_stderr") for each in (entry, bucket)]
    losses = [(each, "loss", "stderr") for each in (entry, bucket)]
    for table, (of, mean, error) in zip(tables, [same, *gains, *losses], strict=True):
        assert table.splitlines()[-1].endswith(format_stderr(of[mean], of[error]))


def test_buckets(tmp_path, data, evaluate, monkeypatch):
    for length, edges in ((64, [0, 64]), (128, [0, 128]), (1000, [0, 128, 256, 512, 1000])):
        assert eval_length.bucket_edges(length) == edges
    monkeypatch.setattr(eval_length, "FIRST_BUCKET", 8)
    run = make_run(tmp_path / "runs", "a", data)
    evaluate(run, "--lengths", 32, 64)
    for row in lengths_of(run):
        by_position = direct_losses(run, data, row["length"], "ntk").view(-1, row["length"]).mean(0)
        for bucket in row["buckets"]:
            assert bucket["loss"] == close(by_position[bucket["from"] : bucket["to"]].mean().item())
        assert row["buckets"][-1]["to"] == row["length"]
    result = read(run / "eval_length.json")  # T = 16 is none of the lengths
    assert result["same_target_tokens"] == result["cut"]["length"] == 16


def test_rows(tmp_path, data, evaluate):
    """Every block's losses, beside those of other scalings."""
    a = make_run(tmp_path / "runs", "a", data)
    b = make_run(tmp_path / "runs", "b", data, normaliser="ssmax_pn")
    evaluate(a, b, "--lengths", 16, 64)
    evaluate(a, b, "--lengths", 16, 64, "--rope", "none", "--tag", "none")
    rows = pd.concat(pd.read_csv(run / FILE) for run in (a, b))
    assert tuple(rows.columns) == Row._fields
    assert {*zip(rows.seed, rows.lr, rows.step, strict=True)} == {(1337, 0.01, 7)}
    assert len(rows) == 2 * 2 * (2 * (2 * N_BLOCKS + 1) + 2 * N_BLOCKS + 1)
    assert rows.value.isna().sum() == 2 * (2 * N_BLOCKS + 1)
    evaluate(a, b, "--lengths", 16, 64)  # again: replaces its own rows
    again = pd.concat(pd.read_csv(run / FILE) for run in (a, b))
    assert len(again) == len(rows) and again.value.isna().sum() == rows.value.isna().sum()
    text = TokenStream(data, "val").fingerprint.removeprefix("sha256 ")[:12] + f"+0x{N_BLOCKS}x64"
    losses = rows[(rows.run == "a") & (rows.text == text)]
    for rope, name in (("ntk", "eval_length.json"), ("none", "eval_length_none.json")):
        for entry in read(a / name)["lengths"]:
            part = losses[(losses.rope == rope) & (losses.length == entry["length"])]
            part = part[~part.measure.str.startswith(("cut", "document"))]
            by_measure = part.groupby("measure").value.agg(list).to_dict()
            assert by_measure == {
                "loss": entry["block_losses"],
                "same_targets[16]": entry["block_same_target_losses"],
                f"loss[0:{entry['length']}]": [entry["buckets"][0]["loss"]],
            }
        counts = losses[(losses.rope == rope) & (losses.measure == "document")].value
        assert counts.tolist() == read(a / name)["block_documents"]
        cut = read(a / name)["cut"]
        part = losses[(losses.rope == rope) & losses.measure.str.startswith("cut")]
        assert part.length.unique().tolist() == [16]
        assert part.groupby("measure").value.agg(list).to_dict() == {
            "cut[16]": cut["block_same_target_losses"],
            "cut[0:64]": [cut["loss"]],
        }


def test_several_scalings_at_once_are_those_of_single_calls(tmp_path, data, evaluate, monkeypatch):
    run = make_run(tmp_path / "runs", "a", data)
    evaluate(run, "--rope", "none", "--tag", "single")
    monkeypatch.setattr(
        eval_length, "cut_losses", n_cuts := Mock(side_effect=eval_length.cut_losses)
    )
    evaluate(run, "--also", "none", "theta=500")
    assert n_cuts.call_count == read(run / "eval_length.json")["data"]["blocks"]  # of all three
    for key in ("cut", "lengths", "options"):
        assert (
            read(run / "eval_length_none.json")[key] == read(run / "eval_length_single.json")[key]
        )
    assert read(run / "eval_length_theta.json")["rope"] == {"kind": "theta", "theta": 500.0}
    # A step later at the second scaling, as of a run in training: its cut is measured again.
    load = EvaluatedRun.load
    steps = iter([3, 12])
    monkeypatch.setattr(EvaluatedRun, "load", lambda *args: (load(*args)[0], next(steps)))
    evaluate(run, "--also", "none", "--replace")
    assert n_cuts.call_count == 3 * read(run / "eval_length.json")["data"]["blocks"]
    with one_line("--also ntk: ntk is there already"):
        evaluate(run, "--also", "ntk")
    with one_line("--also theta: expected its base, as in theta=500000"):
        evaluate(run, "--also", "theta")


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
    load = EvaluatedRun.load

    def fail(run: EvaluatedRun, world: World) -> tuple[GPT, int]:
        if run.label == "b":
            raise UserError("b fails")
        return load(run, world)

    monkeypatch.setattr(EvaluatedRun, "load", fail)
    with pytest.raises(UserError, match="b fails"):
        evaluate(a, b, "--lengths", 16)
    assert (a / "eval_length.json").exists() and (a / "eval_length.png").exists()
    assert not (b / "eval_length.json").exists()


def test_a_foreign_table_stops_before_the_work(tmp_path, data, evaluate):
    a, b = (make_run(tmp_path / "runs", name, data) for name in "ab")
    (b / "rows.csv").write_text("x,y\n1,2\n")
    with one_line("b/rows.csv: expected the rows.csv of a run"):
        evaluate(a, b)
    assert not (a / "eval_length.json").exists()


def test_several_runs_defaults_and_rejected_lengths(tmp_path, data, call, capsys):
    runs = tmp_path / "runs"
    a = make_run(runs, "a", data)
    b = make_run(runs, "b", data, position="none", normaliser="ssmax_pn")
    call(eval_length, a, b, "--device", "cpu")  # which draws
    assert [read(run / "eval_length.json")["rope"]["kind"] for run in (a, b)] == ["ntk", "none"]
    assert [row["length"] for row in lengths_of(a)] == [16, 32, 64, 128, 256]
    rows = lengths_of(b)
    assert [row["reason"] is None for row in rows] == [True, False, False, False, False]
    assert "loss" in rows[0] and "loss" not in rows[1]
    for folder in (a, b, runs):
        assert (folder / "eval_length.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.rglob("*.tmp"))
    out = capsys.readouterr().out
    assert "RoPE ntk and none." in out
    # 256 fits once: one block has no standard error
    assert "b at 32: no result:" in out and "±-" in out


def test_checkpoint_files_and_tags(tmp_path, data, evaluate):
    runs = tmp_path / "runs"
    run = make_run(runs, "a", data, step=7)
    make_run(runs, "a", data, step=9)
    old = run / "checkpoints" / "step_000007.pt"
    new = run / "checkpoints" / "step_000009.pt"
    evaluate(old, new, run, "--lengths", 16, 32)
    results = [
        read(run / f"eval_length{name}.json") for name in ("_step_000007", "_step_000009", "")
    ]
    assert [result["step"] for result in results] == [7, 9, 9]
    assert results[0]["lengths"] != results[1]["lengths"] == results[2]["lengths"]
    assert (run / "eval_length_all.png").exists()
    alone = tmp_path / "alone.pt"
    alone.write_bytes(old.read_bytes())
    evaluate(alone, run, "--lengths", 16, "--tag", "none", "--out", tmp_path / "curve.svg")
    for file in (
        tmp_path / "eval_length_none_alone.json",
        run / "eval_length_none.png",
        tmp_path / "curve.svg",
    ):
        assert file.exists()


def test_ranks_that_read_different_checkpoints_do_not_evaluate(
    tmp_path, data, evaluate, monkeypatch
):
    run = make_run(tmp_path / "runs", "a", data)
    monkeypatch.setattr(World, "gather_objects", lambda world, value: [value, 9])
    with one_line(run, "got a new checkpoint while it was read"):
        evaluate(run, "--lengths", 16)


def test_a_loss_that_is_not_finite(tmp_path, data, call, no_drawing, capsys):
    """In the figure as well, which has no curve."""
    run = make_run(tmp_path / "runs", "a", data)
    model, config, step, *_ = load_model(run)
    with torch.no_grad():
        model.get_parameter("final_norm.weight").fill_(math.nan)
    save_run(run, config, model, step)
    call(eval_length, run, "--lengths", 16, "--device", "cpu")
    assert "a at 16: no result: the model computed NaN or infinity" in capsys.readouterr().out


def test_the_number_of_ranks_changes_nothing(tmp_path, data, evaluate, capsys):
    """Two ranks share 5 blocks; they must not hang at a rejected length."""
    a = make_run(tmp_path / "runs", "a", data, normaliser="lssa", reweight_p=15)
    b = make_run(tmp_path / "runs", "b", data, normaliser="ssmax_pn")
    args = (a, b, "--lengths", 16, 64)
    evaluate(*args)
    one = [[*lengths_of(run), read(run / "eval_length.json")["cut"]] for run in (a, b)]
    output = finish(fork_ranks(eval_length.main, *args, "--device", "cpu"))
    assert output[0][0] == capsys.readouterr().out
    two = [[*lengths_of(run), read(run / "eval_length.json")["cut"]] for run in (a, b)]
    for x, y in zip(sum(one, []), sum(two, []), strict=True):
        assert x.keys() == y.keys() and x["reason"] == y["reason"]
        for key in x.keys() - {"buckets", "reason"}:
            assert x[key] == pytest.approx(y[key], abs=1e-6)


@pytest.mark.parametrize(
    "args, message",
    [
        # before the first is evaluated
        (["{run}", "{tmp}/none"], "no such run folder or checkpoint"),
        (["{tmp}/empty"], "no checkpoint in"),
        (["{run}", "{run}"], "given twice"),
        (["{run}", "--lengths", "16", "512"], "at least 513 for one window of length 512"),
        (["{run}", "--lengths", "32", "--tokens", "31"], "--tokens 31: expected at least 32"),
        (
            ["{run}", "--skip", "512", "--tag", "a"],
            "expected a block of 256 after it; the data has 1 of them",
        ),
        (["{run}", "--lengths", "32", "--skip", "32"], "--skip 32: expected a --tag"),
        (["{run}", "--lengths", "24", "64"], "24 does not divide the longest"),
        (["{run}", "--rope", "theta"], "base None: expected a number above 0"),
        (["{run}", "--data", "{tmp}/gpt2"], "tokenised with 50257 tokens"),
        (["{run}", "--data", "{tmp}/gone"], "gone: no such data folder; prepare it with"),
        (["{run}", "--tag", "a/b"], "--tag a/b: expected only letters"),
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
    assert not (run / "eval_length.json").exists()


def test_runs_of_several_tokenisers_are_refused(tmp_path, data, evaluate, monkeypatch):
    other = tmp_path / "other"
    shutil.copytree(data, other)
    info = read(other / "dataset.json")
    (other / "dataset.json").write_text(json.dumps(info | {"tokenizer": "another"}))
    runs = [
        make_run(tmp_path / "runs", name, folder) for name, folder in (("a", data), ("b", other))
    ]
    names = {"a": "bytes", "b": "another"}
    monkeypatch.setattr(
        common, "read_config", lambda source: (read_config(source)[0], names[source.name])
    )
    with one_line("b: tokens of another: expected bytes, as a has"):
        evaluate(*runs, "--lengths", "8", "64")
