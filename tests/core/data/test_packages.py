"""data.packages: what is held out, what is dropped, and the index that wheels come from."""

import hashlib
import random
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import numpy as np
import pytest
from conftest import check_dataset, one_line

from data import packages
from data.batches import document_blocks
from data.dataset import TokenStream
from data.packages import Package, copied_shares, shared_runs
from data.tokenizer import get_tokenizer

WORDS = [f"{first}{second}" for first in "abcdef" for second in ("lpha", "eta", "amma", "on")]


def some_text(n_lines, seed):
    rng = random.Random(seed)
    lines = (" ".join(rng.choices(WORDS, k=8)) for _ in range(n_lines))
    return "\n".join(lines) + "\n"


SHORT, LONG = (partial(some_text, n) for n in (9, 60))
LICENCE = some_text(6, 999)
COPIED = LONG(20)
FILES: dict[str, dict[str, str | bytes]] = {
    "train/alpha": {
        "alpha/a.py": LICENCE + LONG(1),
        "alpha/b.py": LICENCE + SHORT(2),
        "alpha/copy.py": LICENCE + SHORT(2) + "# a last line\n",
        "alpha/copied.py": COPIED,
        "alpha/_vendor/c.py": LONG(3),
        "alpha/latin1.py": b"# caf\xe9\n" + LONG(4).encode(),
        "alpha/table.py": "".join(map(chr, range(0x4E00, 0x4F00))),
        "alpha/empty.py": "",
        "alpha/data.txt": LONG(5),
    },
    "val/beta_b": {"beta/a.py": LONG(6), "beta/short.py": SHORT(7), "beta/b.py": COPIED[:400]},
    "test/gamma": {
        "gamma/a.py": LICENCE + LONG(8),
        "gamma/copy.py": COPIED[: len(COPIED) // 4] + LONG(9),
        "gamma/of_val.py": LONG(6),
    },
}


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Three packages in tmp_path/index, as an index would serve them."""
    monkeypatch.setattr(packages, "VOCABULARY", 320)
    monkeypatch.setattr(packages, "LONG", 500)
    monkeypatch.setattr(packages, "MOST_SHARED", 0.1)
    rows = []
    for key, files in FILES.items():
        split, name = key.split("/")
        package = Package(split, name, "1.0", "MIT", "")
        folder = tmp_path / "index" / name.replace("_", "-")
        folder.mkdir(parents=True)
        with zipfile.ZipFile(folder / package.wheel, "w") as wheel:
            for file, content in files.items():
                wheel.writestr(file, content)
        digest = hashlib.sha256((folder / package.wheel).read_bytes()).hexdigest()
        rows.append(package._replace(sha256=digest))
    return rows


@pytest.fixture
def wheels(tmp_path, table):
    folder = tmp_path / "wheels"
    folder.mkdir()
    for wheel in tmp_path.glob("index/*/*.whl"):
        (folder / wheel.name).write_bytes(wheel.read_bytes())
    return folder


def texts_of(folder, split):
    stream = TokenStream(folder, split)
    tokenizer = get_tokenizer("", stream.tokenizer_file)
    tokens = stream.read(0, stream.n_tokens)
    parts = np.split(tokens, stream.document_starts())
    assert len(parts[0]) == 0  # the end-of-text token is first
    return {tokenizer.decode(part[1:].tolist()) for part in parts[1:]}


def test_documents(tmp_path, table, wheels, capsys):
    out = tmp_path / "out"
    info = packages.build(table, wheels, out)
    assert texts_of(out, "val") == {LONG(6)}
    assert texts_of(out, "test") == {LICENCE + LONG(8)}
    # of two near copies the one whose name has the lower hash
    twins = {FILES["train/alpha"][f"alpha/{file}.py"] for file in ("b", "copy")}
    train = texts_of(out, "train")
    assert len(train & twins) == 1
    assert train - twins == {LICENCE + LONG(1), COPIED}
    # the licence is in train and test
    assert info["shared"]["val"] == 0 < info["shared"]["test"] < packages.MOST_SHARED
    check_dataset(out)
    assert packages.build(table, wheels, out) == info
    assert "nothing to do" in capsys.readouterr().out


def test_text_that_is_shared_is_refused(tmp_path, table, wheels, monkeypatch):
    monkeypatch.setattr(packages, "MOST_SHARED", 0.001)
    with one_line("test: ", "runs shared: expected 0.1%"):
        packages.build(table, wheels, tmp_path / "out")


def test_the_index(tmp_path, table, wheels, monkeypatch):
    """Wheels are fetched once; other ones are refused; a lost index is named."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "index"))
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}")
        fetched = tmp_path / "fetched"
        info = packages.build(table, fetched, tmp_path / "a")
        other = table[1]._replace(version="2.0")
        with one_line("has no beta_b-2.0-py3-none-any.whl"):
            packages.open_wheel(other, fetched)
        with one_line(fetched / table[1].wheel, "expected 123"):
            packages.open_wheel(table[1]._replace(sha256="123"), fetched)
        server.shutdown()
    assert packages.build(table, wheels, tmp_path / "b")["splits"] == info["splits"]
    (fetched / table[1].wheel).unlink()
    with one_line(table[1].wheel, "cannot be read", "or put it into --wheels"):
        packages.open_wheel(table[1], fetched)


def test_copies_against_a_loop():
    """Runs that cross documents do not count, nor repeats within one."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 3, n) for n in (400, 31, 32, 0, 90)]
    documents += [np.append(documents[0][200:300], documents[4]), np.tile(documents[2], 5)]
    documents += [np.append(documents[4][:20], documents[0][:20])]
    seen: set[tuple[int, ...]] = set()
    for tokens, share in zip(documents, copied_shares(documents), strict=True):
        runs = [tuple(tokens[i : i + 32].tolist()) for i in range(len(tokens) - 31)]
        n_copied = sum(run in seen for run in runs)
        assert share == pytest.approx(n_copied / max(1, len(runs)))
        seen.update(runs)
    held_out = documents[5:7]
    expected = np.average(copied_shares(documents)[5:7], weights=[len(t) - 31 for t in held_out])
    assert shared_runs(documents[:5], held_out) == pytest.approx(expected)


def test_the_table():
    """Every row is whole, a package is in one split, and the licences are permissive."""
    table = packages.read_table(packages.DATA / "packages.csv")
    assert len({package.package for package in table}) == len(table)
    assert {package.split for package in table} == set(packages.MOST_COPIED)
    assert all(len(bytes.fromhex(package.sha256)) == 32 for package in table)
    permissive = ("MIT", "BSD-", "Apache-2.0", "public domain")
    assert all(package.licence.startswith(permissive) for package in table)


@pytest.mark.slow
def test_the_real_corpus(tmp_path):
    """The published one, from the wheels that data.packages has fetched."""
    wheels = packages.DATA / "wheels"
    if not wheels.is_dir():
        pytest.skip("no data/wheels: run python -m data.packages")
    table = packages.read_table(packages.DATA / "packages.csv")
    info = packages.build(table, wheels, tmp_path / "out")
    sha256 = {split: counts["sha256"] for split, counts in info["splits"].items()}
    assert sha256 == packages.PUBLISHED
    assert max(info["shared"].values()) < packages.MOST_SHARED
    stream = TokenStream(tmp_path / "out", "test")
    assert len(document_blocks(stream, packages.LONG)) >= 64
