"""compare.py: an entrant from file to row, the rules, and rows that do not hold. Nothing is stubbed:
commands run in this process, a training takes half a second."""

import gzip
import shutil
from importlib import import_module
from itertools import product
from pathlib import Path

import numpy as np
import pandas
import pytest
from conftest import one_line, write_dataset

import compare
import measure
import sweep
from infra.cli import UserError

RECIPE = """
base = "{track}"
[model]
n_layer = 2
n_head = 2
n_embd = 32
vocab_size = 64
[data]
dir = "{data}"
[train]
max_steps = 40
seq_len = 16
batch_tokens = 128
micro_batch = 8
device = "cpu"
val_every = 40
val_tokens = 320
checkpoint_every = 40
[optimizer]
warmup_steps = 4
"""
PEEK = """
import math

import torch
from torch import Tensor

from normalisers.base import RowContext
from normalisers.family import Softmax

class Peek(Softmax, name="peek"):
    def signals(self, head_dim: int) -> dict[str, list[float]]:
        return {"next": [0.0]}

    def key_decay(self, signals: dict[str, Tensor]) -> Tensor:
        return signals["next"].double().roll(-1, 2)

class Late(Peek, name="late"):  # beyond T alone
    def key_decay(self, signals: dict[str, Tensor]) -> Tensor:
        decay = signals["next"].double()
        return decay.roll(-1, 2) if decay.shape[2] > 20 else decay

class Chunk(Peek, name="chunk"):  # the mean of a whole chunk
    def key_decay(self, signals: dict[str, Tensor]) -> Tensor:
        parts = signals["next"].double().split(8, 2)
        means = [part.mean(2, keepdim=True).expand_as(part) for part in parts]
        return torch.cat(means, 2)

class Total(Softmax, name="total"):  # ln of the number of all keys
    def factor(self, context: RowContext) -> Tensor | float:
        return math.log(1 + context.n_keys) * super().factor(context)
"""


def write_text(folder, trained_on="train"):
    """Documents of 256 tokens; half of the tokens have other followers in test and val."""
    rng = np.random.default_rng(0)
    followers = {"train": rng.permutation(63)}
    followers["test"] = np.where(np.arange(63) % 2, followers["train"], rng.permutation(63))
    splits = {}
    for split, n in (("val", 4), ("test", 4), ("train", 24)):
        rule = followers["train" if split == "train" else "test"]
        splits[split] = []
        for _ in range(n):
            tokens = [63, int(rng.integers(63))]
            while len(tokens) < 257:
                is_drawn = rng.random() < 0.1
                tokens.append(int(rng.integers(63) if is_drawn else rule[tokens[-1]]))
            splits[split] += tokens
    splits["train"] = splits[trained_on]
    return write_dataset(folder, splits, 10_000, vocab=64)


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(track=compare.TRACK, data=write_text(tmp_path / "data")))
    return path


@pytest.fixture
def enter(call, monkeypatch, recipe, no_drawing):
    """compare.py with this recipe, and the commands that it runs."""

    def run(command, *others):
        call(import_module(Path(command[1]).stem), *command[2:])
        return 0

    monkeypatch.setattr(sweep, "run", run)
    monkeypatch.setattr("infra.distributed.signal.signal", lambda *_: None)  # in a thread here

    def compare_with(*arguments, to="runs", tokens=1024):
        options = ["--eval-tokens", tokens, "--base", recipe, "--log.dir", recipe.with_name(to)]
        call(compare, *arguments, *options)

    return compare_with


@pytest.fixture
def mine(own_file):
    path = own_file.with_suffix(".toml")
    path.write_text(f'base = "other.toml"\n[attention]\nnormaliser = "{own_file}:Mine"\n')
    path.with_name("other.toml").write_text("")
    return path


@pytest.fixture
def board(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "runs.csv").write_text(",".join(measure.RUN_COLUMNS) + "\n")
    header = (",".join(measure.COLUMNS) + "\n").encode()
    (folder / "rows.csv.gz").write_bytes(gzip.compress(header))
    return folder


def test_an_entrant_beside_the_board(enter, mine, board, recipe, tmp_path, capsys):
    """Softmax of the board is in the tables; the rows enter it by one command."""
    enter(mine, "--quick", 3, to="quick", tokens=256)
    out = capsys.readouterr().out
    assert "NOT COMPARABLE with the board: 3 steps" in out and "\nNOT COMPARABLE: 3 steps" in out
    assert "mine.toml: recipe.toml takes the place of its base other.toml" in out
    assert {"mine", "softmax"} <= {line.partition(" ")[0] for line in out.splitlines()}
    enter(compare.SOFTMAX, "--seed", 1, 2, "--board", board)
    measure.collect([tmp_path / f"runs/softmax_seed={seed}" for seed in (1, 2)], board)
    capsys.readouterr()
    with one_line("muon_lr=1e+30: step 2: loss nan"):  # which leaves the board of the others
        enter(mine, "--board", board, "--optimizer.muon-lr", 0.02, 1e30)
    tables = capsys.readouterr().out.split("The board")[1].split("\nwrote ")[0]
    assert max(map(len, tables.splitlines())) <= 80
    lines = [line.split() for line in tables.splitlines() if line.startswith(("mine", "softmax"))]
    differences = {line[0]: line[2:] for line in lines[:2]}
    costs = {line[0]: line[1:] for line in lines[2:]}
    assert differences["softmax"][0] == "2" and differences["mine"][0] == "1"  # seeds
    assert "±" in differences["mine"][2] and "±" in costs["mine"][4]  # of what is beyond T
    assert differences["softmax"][-1] == differences["mine"][-1] == "-"  # p: of itself, of a seed
    assert differences["softmax"][1] == "+.000"
    assert costs["softmax"][-3:] == ["1.00", "29568", "1"]
    assert (tmp_path / "runs/compare.png").exists()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("model.n_embd = 64", "model.n_embd = 64: expected 32, the track's"),
        ("train.batch_tokens = 64", "train.batch_tokens = 64: expected 128, the track's"),
        ("train.max_steps = 41", "train.max_steps = 41: expected 40, the track's"),
        ('init_from = "x"', "init_from = 'x': expected '', the track's"),
        ("model.attention_gate = true", "parameters: expected at most"),
        ("data.dir = 'DATA'", "train has sha256 "),
        ("attention.normaliser = 'PEEK:Peek'", "mine: a row looks at later keys"),
        ("attention.normaliser = 'PEEK:Late'", "mine: a row looks at later keys"),
        ("attention.normaliser = 'PEEK:Chunk'", "mine: a row looks at later keys"),
        ("attention.normaliser = 'PEEK:Total'", "mine: a row looks at later keys"),
        ("name = 'softmax_seed=1'\nmodel.window = 4", "expected another name"),
    ],
)
def test_rules(content, expected, enter, tmp_path, monkeypatch):
    path = tmp_path / "mine.toml"
    content = content.replace("DATA", str(write_text(tmp_path / "cheat", trained_on="test")))
    peek = tmp_path / "peek.py"
    peek.write_text(PEEK)
    path.write_text(content.replace("PEEK", str(peek)))
    monkeypatch.setattr(sweep, "run", lambda *_: pytest.fail("nothing may be trained"))
    with one_line(expected):
        enter(path)


def test_a_recipe_without_a_test_split_is_held_to_the_splits_that_it_has(recipe, tmp_path):
    parts = []
    for folder, first in (("two", 0), ("other", 1)):
        splits = {"val": [63, first, 2, 3] * 64, "train": [63, 1, 2, 3] * 64}
        data = write_dataset(tmp_path / folder, splits, 10_000, vocab=64)
        parts.append(compare.load_config(recipe, ["--data.dir", str(data)]))
    ours, other = parts
    compare.check_text(ours, ours)
    with pytest.raises(UserError, match="other: val has"):
        compare.check_text(other, ours)


def test_larger_caches_are_refused(recipe, monkeypatch):
    append = compare.KVCache.append

    def append_more(cache, layer, *parts):
        return append(cache, layer, *parts, parts[0])[: len(parts)]

    model = compare.GPT(compare.load_config(recipe)).eval()
    compare.check_cache("mine", model)
    monkeypatch.setattr(compare.KVCache, "append", append_more)
    with one_line("mine: 192 numbers of a position are kept at inference: expected 128"):
        compare.check_cache("mine", model)


def test_rows_that_hold_and_that_do_not(enter, call, mine, own_file, board, tmp_path, capsys):
    enter(mine, "--board", board, "--seed", 1)
    run = tmp_path / "runs/mine"
    measure.collect([run], board)
    enter("--check", board, mine, to="check")
    assert "mine: the row holds" in capsys.readouterr().out

    rows = measure.read_rows(run)
    measure.write_rows(run, rows.assign(value=rows["value"] - 0.02))
    measure.collect([run], board)
    with one_line("mine: the row has ", ": expected ", "±0.0050"):
        enter("--check", board, mine, to="check")

    data = tmp_path / "data"
    cheat = tmp_path / "cheat.toml"
    stored = (run / "config.toml").read_text()
    stored = stored.replace(str(data), str(write_text(tmp_path / "cheat", trained_on="test")))
    cheat.write_text(stored.replace(str(run.parent), str(tmp_path / "cheated")))
    shutil.copy(next(run.glob("mine-*.py")), tmp_path)
    call(import_module("train"), cheat)
    cheated = tmp_path / "cheated/mine"
    for split in ("val", "test"):
        options = ["--data", data, "--split", split, "--tokens", 1024]
        call(import_module("eval_length"), cheated, *options)
    measure.collect([cheated], board)
    with one_line("mine: the row has ", ": expected "):
        enter("--check", board, mine, to="check")

    with one_line("no run of softmax with seed 1"):
        enter("--check", board, compare.SOFTMAX, to="again")
    own_file.write_text(own_file.read_text() + "\n# edited\n")
    with one_line("mine: its file has sha256 ", ", the row's"):
        enter("--check", board, mine, to="again")
    with one_line("runs/mine: holds another run (attention.normaliser was 'mine-"):
        enter(mine, "--board", board)


@pytest.fixture
def tried():
    """Tables of runs and rows: mine with two seeds at 0.02, and with one, which is lower, at 0.04."""
    losses = {
        "mine_muon_lr=0.02_seed=1": 3.6,
        "mine_muon_lr=0.02_seed=2": 3.7,
        "mine_muon_lr=0.04_seed=1": 3.5,
    }
    runs = []
    rows = []
    for run, loss in losses.items():
        known = {"run": run, "variant": "mine", "options": "mine", "T": "8", "steps": "5"}
        runs.append(dict.fromkeys(measure.RUN_COLUMNS, "") | known)
        for text, length, block in product(("val", "test"), (8, 32, 128), (0, 1)):
            where = (run, 5, text, "same_targets", length, "0", "none", block, block)
            rows.append((*where, loss + block))
    return pandas.DataFrame(runs), measure.as_rows(rows)


def test_rates_of_fewer_seeds_do_not_compete(tried):
    runs, rows = tried
    (entry,) = compare.make_entries(runs, rows, "test", "val")
    assert list(entry.runs["run"].str[-6:]) == ["seed=1", "seed=2"] and entry.n_rates == 2
    assert entry.loss(16) == pytest.approx(4.15)
    rows = rows.query("run != 'mine_muon_lr=0.02_seed=2'")
    (entry,) = compare.make_entries(runs, rows, "test", "val")
    assert len(entry.runs) == 1 and entry.loss(16) == 4 and entry.n_rates == 2


def test_two_attentions_of_one_name(tried, board):
    runs, rows = tried
    other = runs.assign(options="another", run="mine_seed=3")
    other.to_csv(board / "runs.csv", index=False)
    with one_line("mine: options is mine: ", "has another: expected another name"):
        compare.with_board(board, runs, rows)
    other.assign(run="study/mine_seed=3").to_csv(board / "runs.csv", index=False)
    assert len(compare.with_board(board, runs, rows)[0]) == len(runs)


def test_a_row_that_lacks_a_length_or_hides_in_its_noise(tried):
    run = "mine_muon_lr=0.02_seed=1"
    rows = tried[1].query("run == @run")
    compare.check_losses(run, rows, rows)
    with one_line("the row has no losses, or not all, of text val at 128"):
        compare.check_losses(run, rows, rows.query("length < 128"))
    noise = np.tile([-0.4, 0.3], len(rows) // 2)
    with one_line("the row has 4.0500 at ", "expected 4.1000 ±0.0200"):
        compare.check_losses(run, rows, rows.assign(value=rows["value"] + noise))
