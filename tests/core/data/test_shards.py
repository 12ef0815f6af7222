"""Shards and their damages, dataset.json, the token stream, batches as pure functions."""

import hashlib
import os
import resource

import numpy as np
import pytest
from conftest import one_line, write_dataset, write_shard

from data import batches, dataset
from data.batches import (
    document_blocks,
    read_targets,
    read_windows,
    train_batch,
    val_windows,
)
from data.dataset import TokenStream, dataset_info
from data.shards import open_shard

LENGTHS = (7, 1, 50, 3, 40)  # shard sizes of `stream`: 101 tokens, shorter and longer than a window


def write_train(folder, parts, first=1):
    for i, part in enumerate(parts, first):
        write_shard(folder / f"toy_train_{i:06d}.bin", part)


@pytest.fixture
def tokens():
    return np.random.default_rng(0).integers(0, 50257, sum(LENGTHS))


@pytest.fixture
def stream(tmp_path, tokens):
    write_train(tmp_path, np.split(tokens, np.cumsum(LENGTHS)[:-1]))
    return TokenStream(tmp_path, "train")


# ---------------------------------------------------------------- format


def test_shard_round_trip_and_layout(tmp_path):
    path = tmp_path / "toy_val_000000.bin"
    sha256 = write_shard(path, [0, 1, 258, 65535])
    content = path.read_bytes()
    assert list(np.frombuffer(content[:1024], "<i4")) == [20240520, 1, 4] + [0] * 253
    assert content[1024:] == b"\x00\x00\x01\x00\x02\x01\xff\xff"
    assert sha256 == hashlib.sha256(content).hexdigest()
    assert open_shard(path, 65536).tolist() == [0, 1, 258, 65535]
    assert os.listdir(tmp_path) == [path.name]  # no temporary file is left


def test_more_shards_than_open_files_are_allowed(tmp_path):
    """As 100B tokens have under the usual limit of 1,024."""
    write_train(tmp_path, [[i] for i in range(100)])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (90, limits[1]))
    try:
        assert TokenStream(tmp_path, "train").read(0, 100).tolist() == [*range(100)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("bad", [[0, -1], [65536, 5], np.array([65536]), [1.5]])
def test_write_rejects_non_uint16(tmp_path, bad):
    path = tmp_path / "toy_val_000000.bin"
    with one_line(path, min(bad), max(bad), "expected tokens 0 to 65535"):
        write_shard(path, bad)
    assert not path.exists()


def _header(magic=20240520, version=1, count=4):
    return np.array([magic, version, count] + [0] * 253, dtype="<i4").tobytes()


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"", ["magic number 0"]),
        (_header(magic=20240801) + bytes(8), ["magic number 20240801", "expected 20240520"]),
        (_header(version=2) + bytes(8), ["version 2", "expected 20240520, 1"]),
        (_header(count=-3), ["header's -3 tokens"]),
        (_header() + bytes(9), ["1033 bytes", "expected 1032"]),
        # Tokens are sampled, the first and the last one always.
        (_header(count=100_000) + b"\x01\x01" + bytes(199_998), ["token 257", "below 257"]),
        (_header(count=100_000) + bytes(199_998) + b"\x01\x01", ["token 257", "below 257"]),
    ],
)
def test_every_damage_is_named(tmp_path, content, parts):
    path = tmp_path / "toy_train_000001.bin"
    path.write_bytes(content)
    with one_line(path, *parts):
        open_shard(path, 257)


def test_gaps_and_mixtures_are_rejected(tmp_path):
    for folder in (tmp_path / "none", tmp_path):
        with one_line(folder, "prepare it with"):
            TokenStream(folder, "train")
    write_shard(tmp_path / "toy_val_000000.bin", [1])
    write_train(tmp_path, [[i] for i in range(4)])
    assert TokenStream(tmp_path, "train").n_tokens == 4
    for missing, other in (
        (1, "other_val_000001"),  # another dataset's or split's fills no gap
        (2, "toy_val_000002"),
        (2, "other_val_000002"),
        (3, "toy_train_3"),
    ):
        path = tmp_path / f"toy_train_{missing:06d}.bin"
        path.rename(tmp_path / f"{other}.bin")
        with one_line(path, "missing, though there is toy_train"):
            TokenStream(tmp_path, "train")
        (tmp_path / f"{other}.bin").rename(path)
    write_shard(tmp_path / "other_train_000005.bin", [1])
    with one_line(tmp_path, "other, toy"):
        TokenStream(tmp_path, "train")


def test_shards_under_the_names_of_llm_c(tmp_path):
    """TinyStories and tiny Shakespeare have one shard a split; what else there is is named."""
    for split, tokens in (("val", [1]), ("train", [2, 3])):
        write_shard(tmp_path / f"a_{split}_000000.bin", tokens)
        (tmp_path / f"a_{split}_000000.bin").rename(tmp_path / f"TinyStories_{split}.bin")
        stream = TokenStream(tmp_path, split)
        assert stream.read(0, stream.n_tokens).tolist() == tokens
    (tmp_path / "nanogpt").mkdir()
    (tmp_path / "nanogpt" / "train.bin").write_bytes(b"1234")
    with one_line("no shards named *_train_*.bin, though there is train.bin"):
        TokenStream(tmp_path / "nanogpt", "train")
    llama = np.array([20240801, 7, 1] + [0] * 253, "<i4").tobytes() + b"abcd"
    (tmp_path / "TinyStories_train.bin").write_bytes(llama)
    with one_line("TinyStories_train.bin", "magic number 20240801", "expected 20240520, 1"):
        TokenStream(tmp_path, "train")


def test_several_val_shards_before_train(tmp_path):
    write_shard(tmp_path / "toy_val_000000.bin", [0])
    write_shard(tmp_path / "toy_val_000001.bin", [1])
    write_train(tmp_path, [[2], [3]], first=2)
    assert TokenStream(tmp_path, "val").read(0, 2).tolist() == [0, 1]
    assert TokenStream(tmp_path, "train").read(0, 2).tolist() == [2, 3]


# ---------------------------------------------------------------- dataset.json


@pytest.fixture
def toy(tmp_path):
    """Shards 0 to 2 of val, 3 to 5 of train: 10 tokens each in shards of 4."""
    return write_dataset(tmp_path, {"val": np.arange(10), "train": np.arange(10)}, 4)


def test_dataset_info(tmp_path, toy):
    info = dataset_info(toy)
    assert (info["format_version"], info["dataset"], info["vocab_size"]) == (1, "toy", 257)
    shards = [("toy_val_000000.bin", 4), ("toy_val_000001.bin", 4), ("toy_val_000002.bin", 2)]
    assert [(file["file"], file["tokens"]) for file in info["shards"][:3]] == shards
    stream = TokenStream(toy, "val")
    all_tokens = stream.read(0, stream.n_tokens)
    assert all_tokens.tolist() == list(range(10))
    assert (
        hashlib.sha256(all_tokens.astype("<u2").tobytes()).hexdigest()
        == info["splits"]["val"]["sha256"]
    )
    (toy / "dataset.json").unlink()
    assert dataset_info(toy) == {"tokenizer": "gpt2", "vocab_size": 50257}
    partial = toy / ".cache/huggingface/download/abc=.f00.incomplete"
    partial.parent.mkdir(parents=True)
    partial.touch()
    with one_line(partial, "a download that did not finish"):
        dataset_info(toy)


def test_shards_must_be_those_in_dataset_json(toy):
    first, last = toy / "toy_train_000003.bin", toy / "toy_train_000005.bin"
    last.unlink()  # no gap in the numbers
    with one_line(last, "cannot be read as a shard"):
        TokenStream(toy, "train")
    write_shard(first, [1, 2, 3])
    write_shard(last, [1, 2, 3])  # as many tokens in all
    with one_line(first, "3 tokens", "lists 4"):
        TokenStream(toy, "train")
    write_shard(toy / "toy_val_000006.bin", [1])
    with one_line("toy_val_000006.bin", "does not list it"):
        TokenStream(toy, "val")
    with one_line(toy, "has no split 'test'"):
        TokenStream(toy, "test")


def test_damaged_dataset_json_is_named(toy):
    path = toy / "dataset.json"
    content = path.read_text()
    for damaged, part in (
        (content.replace("257", '"257"'), "vocab_size = '257'"),
        (content.replace('"tokens"', '"token"'), "tokens"),
        (content[:-3], "not valid JSON"),
        ("[]", "JSON object"),
    ):
        path.write_text(damaged)
        with one_line(path, part):
            dataset_info(toy)


# ---------------------------------------------------------------- stream


def test_reads_cross_shards_and_wrap(stream, tokens):
    endless = np.concatenate([tokens] * 4)
    assert stream.n_tokens == 101 and type(stream.n_tokens) is int
    for start in range(101):
        for length in (0, 1, 2, 45, 101, 250):
            got = stream.read(start, length)
            assert got.dtype == np.int64 and got.shape == (length,)
            np.testing.assert_array_equal(got, endless[start : start + length])
    np.testing.assert_array_equal(stream.read(101 * 10**15 + 5, 3), tokens[5:8])


def test_a_token_that_no_sample_met_is_named_when_it_is_read(tmp_path):
    spoilt = np.zeros(100_000, np.uint16)
    spoilt[54_321] = 300
    write_train(tmp_path, [spoilt[:9], spoilt])
    stream = TokenStream(tmp_path, "train")
    stream.vocab_size = 257
    stream.read(0, 50_000)
    with one_line("_train_000002.bin", "token 300", "below 257"):
        stream.read(50_000, 5_000)


def test_without_dataset_json_a_stream_is_known_by_its_ends(tmp_path):
    tokens = np.arange(20_000, dtype=np.uint16)
    fingerprints = set()
    for name, last in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        write_train(tmp_path / name, [np.append(tokens, last)])
        fingerprints.add(TokenStream(tmp_path / name, "train").fingerprint)
    assert len(fingerprints) == 2


def test_counts_beyond_int32(tmp_path, monkeypatch):
    """11 shards of 10^9 tokens, faked: sums of numpy int32 would be negative."""
    size = 10**9
    write_train(tmp_path, [np.array([1])] * 11)
    huge = iter(np.broadcast_to(np.uint16(i), (size,)) for i in range(11))
    monkeypatch.setattr(dataset, "open_shard", lambda path, vocab_size: next(huge))
    stream = TokenStream(tmp_path, "train")
    assert stream.n_tokens == 11 * size
    assert stream.read(10 * size - 2, 4).tolist() == [9, 9, 10, 10]
    assert stream.read(11 * size - 1, 2).tolist() == [10, 0]
    x, _ = train_batch(stream, 10**6, 512, 1024, "sequential", 0, 511, 1)
    assert x[0, 0] == ((10**6 * 512 + 511) * 1024) % (11 * size) // size


# ---------------------------------------------------------------- batches


@pytest.mark.parametrize("order", ["sequential", "shuffled"])
def test_batch_does_not_depend_on_history_or_world_size(stream, order):
    n_seq, seq_len = 12, 9
    whole = {s: train_batch(stream, s, n_seq, seq_len, order, 7) for s in range(6)}  # type: ignore[arg-type]
    fresh = TokenStream(stream.folder, "train")
    for step in (5, 0, 3):
        for world in (1, 2, 3, 4):
            share = n_seq // world
            parts = [
                train_batch(fresh, step, n_seq, seq_len, order, 7, rank * share, share)  # type: ignore[arg-type]
                for rank in range(world)
            ]
            for i in (0, 1):
                np.testing.assert_array_equal(np.concatenate([p[i] for p in parts]), whole[step][i])
    x, y = whole[0]
    assert x.shape == y.shape == (12, 9) and x.dtype == y.dtype == np.int64
    assert not np.shares_memory(x, y)
    np.testing.assert_array_equal(x[:, 1:], y[:, :-1])


def test_sequential_is_the_stream_without_dropped_tails(stream, tokens):
    x, y = zip(*(train_batch(stream, s, 5, 9, "sequential", 0) for s in range(20)), strict=True)
    endless = np.concatenate([tokens] * 10)  # 20 steps of 45 tokens
    np.testing.assert_array_equal(np.concatenate(x).ravel(), endless[:900])
    np.testing.assert_array_equal(np.concatenate(y).ravel(), endless[1:901])


def test_shuffled_is_a_permutation_of_windows_per_epoch(tmp_path):
    write_train(tmp_path, [np.arange(60), np.arange(60, 115)])
    stream = TokenStream(tmp_path, "train")  # 11 windows of 10, a tail of 5; token = position

    def starts(seed):
        rows = [train_batch(stream, s, 3, 10, "shuffled", seed) for s in range(44)]
        x, y = (np.concatenate(part) for part in zip(*rows, strict=True))
        np.testing.assert_array_equal(x, x[:, :1] + np.arange(10))
        np.testing.assert_array_equal(y, x + 1)
        return x[:, 0].reshape(12, 11)  # (epoch, place); batches of 3 run across epoch ends

    epochs = starts(0)
    assert all(sorted(epoch) == list(range(0, 110, 10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 12
    assert not np.array_equal(epochs, starts(1))
    assert not np.array_equal(epochs, starts(2**40))


def test_shuffled_windows_without_a_tail(tmp_path):
    """The last target of the last window is the first token of all."""
    write_train(tmp_path, [np.arange(20)])
    x, y = train_batch(TokenStream(tmp_path, "train"), 0, 2, 10, "shuffled", 0)
    assert sorted(x[:, 0]) == [0, 10] and y[x[:, 0] == 10, -1] == 0


def test_permutation_is_unbiased():
    """Where place 3 of 10 goes over 4000 epochs; and neighbours do not stay neighbours."""
    counts = np.bincount(
        [batches._permutation(10, 0, epoch)[3] for epoch in range(4000)], minlength=10
    )
    assert (np.abs(counts - 400) < 5 * 20).all()  # 5 standard deviations
    permutation = batches._permutation(10**5, 0, 0).astype(np.int64)
    assert (np.abs(np.diff(permutation)) == 1).sum() < 20  # 2 are expected by chance
    assert abs(np.corrcoef(np.arange(10**5), permutation)[0, 1]) < 0.02


def test_permutation_is_fixed_forever():
    """Runs are compared across versions of numpy and of this repo: the order must not change."""
    assert batches._permutation(10, 1337, 0).tolist() == [8, 5, 2, 1, 6, 3, 4, 0, 7, 9]
    assert batches._permutation(10, 2**62, 1).tolist() == [7, 1, 2, 9, 4, 8, 3, 6, 5, 0]


def test_val_windows_are_the_same_tokens_at_every_length(stream, tokens):
    for seq_len in (1, 2, 5, 10, 20, 40):
        n = val_windows(stream, 80, seq_len)
        assert n * seq_len == 80
        batches = [read_windows(stream, i, min(3, n - i), seq_len) for i in range(0, n, 3)]
        np.testing.assert_array_equal(np.concatenate([x.ravel() for x, _ in batches]), tokens[:80])
        np.testing.assert_array_equal(np.concatenate([y.ravel() for _, y in batches]), tokens[1:81])
    assert val_windows(stream, 10**9, 10) == 10  # 101 tokens are 100 predictions
    assert val_windows(stream, 10**9, 50) == 2
    assert val_windows(stream, 99, 50) == 1


def test_the_first_token_is_no_prediction(tiny_dataset):
    """1,000 tokens are 999 predictions: a window of 10 less than the tokens have."""
    assert val_windows(TokenStream(tiny_dataset, "val"), 10**9, 10) == 99


def test_too_short_for_one_window(stream):
    assert val_windows(stream, 1000, 100) == 1
    for call in (
        lambda: val_windows(stream, 1000, 101),
        lambda: train_batch(stream, 0, 1, 101, "sequential", 0),
        lambda: train_batch(stream, 0, 1, 101, "shuffled", 0),
    ):
        with one_line(stream.folder, "101 tokens", "window of length 101"):
            call()


@pytest.mark.parametrize("shard_size", [6, 100])
def test_one_block_at_the_end_of_each_long_document(tmp_path, shard_size):
    """After the end of another document; as long as the block, shorter, empty, the last one."""
    lengths = [5, 4, 0, 11, 3, 6]
    tokens = [9, 9]  # of a document that began before
    for number, length in enumerate(lengths):
        tokens += [256, *(10 * number + i for i in range(length))]
    stream = TokenStream(write_dataset(tmp_path, {"val": tokens}, shard_size), "val")
    blocks = document_blocks(stream, 5)
    assert [number for _, number in blocks] == [0, 3, 5]
    for start, number in blocks:
        x, y = read_targets(stream, start, 5)
        last = range(10 * number + lengths[number] - 5, 10 * number + lengths[number])
        assert y.tolist() == list(last)
        assert x.tolist() == [256 if lengths[number] == 5 else last[0] - 1, *last[:-1]]
    assert document_blocks(stream, 12) == []
