"""compare.py: an entrant from file to row, the rules, and rows that do not hold."""

import gzip
from importlib import import_module
from pathlib import Path

import pytest
from conftest import make_dataset, one_line

import compare
import measure
import sweep
from config import load_config
from model import GPT

TOKENS = 512


@pytest.fixture
def enter(call, monkeypatch, tiny_config, no_drawing):
    """compare.py with the tiny config as its recipe, its commands in this process."""

    def run(command, *others):
        call(import_module(Path(command[1]).stem), *command[2:])
        return 0

    monkeypatch.setattr(sweep, "run", run)
    softmax = tiny_config.with_name("softmax.toml")
    softmax.write_text("")
    monkeypatch.setattr(compare, "SOFTMAX", softmax)
    options = ["--eval-tokens", TOKENS, "--base", tiny_config, "--train.device", "cpu"]
    monkeypatch.setattr(compare, "FREE_KEYS", (*compare.FREE_KEYS, "train.device"))
    monkeypatch.setattr("infra.distributed.signal.signal", lambda *_: None)  # in a thread here

    def compare_with(*arguments, to="runs"):
        call(compare, *arguments, *options, "--log.dir", tiny_config.with_name(to))

    return compare_with


@pytest.fixture
def mine(own_file):
    path = own_file.with_suffix(".toml")
    path.write_text(f'base = "other.toml"\n[attention]\nnormaliser = "{own_file}:Mine"\n')
    path.with_name("other.toml").write_text("")
    return path


def test_an_entrant_beside_the_board(enter, mine, tiny_config, tmp_path, capsys):
    """Softmax of the board is in the tables; the rows enter it by one command."""
    board = tmp_path / "results"
    board.mkdir()
    softmax = compare.SOFTMAX
    enter(mine, "--quick", 3, to="quick")
    out = capsys.readouterr().out
    assert out.startswith("NOT COMPARABLE with the board: 3 steps") and "\nNOT COMPARABLE: 3" in out
    lines = [line.split() for line in out.splitlines()]
    assert {line[0] for line in lines if "." in "".join(line[3:4])} >= {"mine", "softmax"}
    enter(softmax, "--seed", 1, 2, "--board", empty_board(board))
    runs = [tmp_path / f"runs/softmax_seed={seed}" for seed in (1, 2)]
    measure.collect(runs, board)
    capsys.readouterr()
    enter(mine, "--board", board)
    out = capsys.readouterr().out
    assert "mine.toml: tiny.toml takes the place of its base other.toml" in out
    tables = out.split("The board")[1].split("\nwrote ")[0]
    lines = [line.split() for line in tables.splitlines() if line.startswith(("mine", "softmax"))]
    assert sorted(line[0] for line in lines) == ["mine", "mine", "softmax", "softmax"]
    assert [line[2] for line in sorted(lines[:2])] == ["1", "2"]  # seeds
    assert max(map(len, tables.splitlines())) <= 80
    assert (tmp_path / "runs/compare.png").exists()


def empty_board(folder):
    (folder / "runs.csv").write_text(",".join(measure.RUN_COLUMNS) + "\n")
    header = (",".join(measure.COLUMNS) + "\n").encode()
    (folder / "rows.csv.gz").write_bytes(gzip.compress(header))
    return folder


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("model.n_embd = 64", "model.n_embd = 64: expected 32, the track's"),
        ("train.batch_tokens = 64", "train.batch_tokens = 64: expected 128, the track's"),
        ('init_from = "x"', "init_from = 'x': expected '', the track's"),
        ("model.attention_gate = true", "parameters: expected at most"),
        ('attention.normaliser = "ssmax_pn"', "train.py ended with status 2"),
        ("data.dir = 'DATA'", "expected sha256 "),
    ],
)
def test_rules(content, expected, enter, tiny_config, tmp_path, monkeypatch):
    path = tmp_path / "mine.toml"
    other = make_dataset(tmp_path / "other", n_train=6000)
    path.write_text(content.replace("DATA", str(other)))
    trained: list[str] = []
    monkeypatch.setattr(sweep, "run", lambda command, *_: trained.append(command[1]) or 2)
    with pytest.raises(ValueError, match=expected):
        enter(path)
    assert bool(trained) == expected.startswith("train.py")


def test_later_keys_and_larger_caches_are_refused(tiny_config, monkeypatch):
    model = GPT(load_config(tiny_config)).eval()
    compare.check_causal("mine", model)
    compare.check_cache("mine", model)
    hidden = GPT.hidden
    with monkeypatch.context() as patch:
        patch.setattr(GPT, "hidden", lambda *args: (x := hidden(*args)) + x.mean(1, keepdim=True))
        with one_line("mine: a row looks at later keys"):
            compare.check_causal("mine", model)
    append = compare.KVCache.append

    def append_more(cache, layer, *parts):
        return append(cache, layer, *parts, parts[0])[: len(parts)]

    monkeypatch.setattr(compare.KVCache, "append", append_more)
    with one_line("mine: 192 numbers of a position are kept at inference: expected 128"):
        compare.check_cache("mine", model)


def test_rows_that_hold_and_that_do_not(enter, mine, own_file, tmp_path, capsys):
    board = empty_board(tmp_path)
    enter(mine, "--board", board, "--seed", 1)
    run = tmp_path / "runs/mine"
    measure.collect([run], board)
    capsys.readouterr()
    enter("--check", board, mine, to="check")
    assert "mine: the row holds" in capsys.readouterr().out
    rows = measure.read_rows(run)
    honest = (board / "rows.csv.gz").read_bytes()
    measure.write_rows(run, rows.assign(value=rows["value"] - 0.02))
    measure.collect([run], board)
    with one_line("mine: the row has ", ": expected ", "±0.0050"):
        enter("--check", board, mine, to="check")
    (board / "rows.csv.gz").write_bytes(honest)
    own_file.write_text(own_file.read_text() + "\n# edited\n")
    with one_line("check/mine: was trained with other code, mine-"):
        enter("--check", board, mine, to="check")
    with one_line("mine: its file has sha256 ", ", the row's"):
        enter("--check", board, mine, to="again")
    with one_line("no run of softmax with seed 1"):
        enter("--check", board, compare.SOFTMAX, to="again")
