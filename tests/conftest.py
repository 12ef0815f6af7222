"""The tiny dataset and config that tests train on, and the environment that all tests need."""

import gc
import os
import signal
import sys
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

# A shell that starts the tests in the background makes them, and what they start, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported


def pytest_addoption(parser):
    parser.addoption(
        "--normaliser", metavar="FILE.py:CLASS", help="a class of your own to test, too"
    )


def pytest_configure(config):
    """Keep the tests on the CPU, but for `pytest -m gpu`, and register --normaliser's class.

    TRITON_INTERPRET is read when Triton is imported, which torch may do in any test file. The
    kernels then run on the CPU (tests/core/engines/test_triton.py).
    """
    if config.getoption("markexpr") != "gpu":
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.fsync = lambda fd: None  # no test outlives the machine
    gc.disable()  # imports and collection leave no garbage
    if own := config.getoption("--normaliser"):
        from normalisers.own import NORMALISERS, find_normaliser

        try:
            formula = find_normaliser(own)
            NORMALISERS[formula.name] = formula
        except ValueError as e:
            raise pytest.UsageError(f"--normaliser {own}: {e}") from None


def pytest_collection_finish():
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def freeze():
    """As train.main() does: training collects garbage at each save, which would scan all modules
    anew.
    """
    gc.collect()
    gc.freeze()


def slow(*values):
    """Parameters of a test that run with ./test.sh --all only."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


VOCAB = 64
needs_gpt2 = pytest.mark.skipif(
    "TIKTOKEN_CACHE_DIR" not in os.environ,
    reason="TIKTOKEN_CACHE_DIR is not set: gpt2 needs its files",
)


@contextmanager
def one_line(*parts):
    """The block raises a UserError of one line with these parts."""
    from infra.cli import UserError

    with pytest.raises(UserError) as error:
        yield
    message = str(error.value)
    assert "\n" not in message and all(str(part) in message for part in parts), message


TINY = """
[model]
n_layer = 2
n_head = 2
n_embd = 32
vocab_size = {vocab}
[data]
dir = "{data}"
[train]
max_steps = 12
seq_len = 16
batch_tokens = 128
micro_batch = 4
dtype = "float32"
val_every = 4
val_tokens = 320
checkpoint_every = 3
keep_last = 20
[optimizer]
lr = 1e-2
warmup_steps = 2
[log]
dir = "{runs}"
every = 2
"""


def write_dataset(folder, splits, shard_size, vocab=257):
    """A prepared dataset of these tokens, whose last one is `<|endoftext|>`."""
    from data.dataset import begin_dataset, finish_dataset, write_split

    begin_dataset(folder, "toy")
    info: dict[str, Any] = {
        "dataset": "toy",
        "tokenizer": "bytes",
        "vocab_size": vocab,
        "source": "a test",
    }
    info |= {"splits": {}, "shards": []}
    for split, tokens in splits.items():
        n_documents = int((np.asarray(tokens) == vocab - 1).sum())
        write_split(folder, info, split, [tokens], n_documents, shard_size)
    finish_dataset(folder, info)
    return folder


def check_dataset(folder):
    """The files are those in dataset.json, byte for byte, and their tokens are of the vocabulary."""
    from data.dataset import TokenStream, dataset_info
    from data.shards import check_recorded, check_vocabulary, open_shard

    info = dataset_info(folder)
    assert {path.name for path in folder.glob("*.bin")} == {
        shard["file"] for shard in info["shards"]
    }
    for shard in info["shards"]:
        tokens = open_shard(folder / shard["file"])
        check_recorded(folder / shard["file"], tokens, shard)
        check_vocabulary(folder / shard["file"], tokens, info["vocab_size"])
    for split in info["splits"]:
        _ = TokenStream(folder, split).tokenizer_file


def train_bpe(texts, n_vocab):
    """The content of a tokenizer.json, a byte-level BPE of the texts."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        texts, n_vocab, show_progress=False, special_tokens=["<|endoftext|>"]
    )
    return str(tokenizer.to_str())


def make_dataset(folder, n_val=1000, n_train=5500, vocab=VOCAB):
    """A prepared dataset with something to learn: each token mostly determines the next."""
    rng = np.random.default_rng(0)
    follower = rng.permutation(vocab)
    splits = {}
    for split, n in (("val", n_val), ("train", n_train)):
        tokens = [0]
        while len(tokens) < n:
            tokens.append(int(follower[tokens[-1]] if rng.random() < 0.9 else rng.integers(vocab)))
        splits[split] = tokens
    return write_dataset(folder, splits, 3000, vocab)


def flip(path, at):
    """Change one bit of the byte there."""
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def write_shard(path, tokens):
    """Write one shard <dataset>_<split>_<index>.bin; returns its sha256."""
    from data.shards import ShardWriter

    dataset, split, index = path.stem.rsplit("_", 2)
    writer = ShardWriter(path.parent, dataset, split, 10**9, int(index))
    writer.add(tokens)
    writer.flush()
    sha256: str = writer.files[0]["sha256"]
    return sha256


@pytest.fixture(scope="session")
def tiny_dataset(tmp_path_factory):
    """1,000 validation and 5,500 training tokens below `VOCAB`; read-only: shared by all tests."""
    return make_dataset(tmp_path_factory.mktemp("tiny") / "data")


@pytest.fixture
def tiny_config(tmp_path, tiny_dataset):
    """A config file that trains 12 steps in a fraction of a second, into tmp_path/runs/tiny."""
    path = tmp_path / "tiny.toml"
    path.write_text(TINY.format(vocab=VOCAB, data=tiny_dataset, runs=tmp_path / "runs"))
    return path


@pytest.fixture
def no_drawing(monkeypatch):
    """Figures are made but not drawn, which takes most of the time of an evaluation this small."""
    from matplotlib.figure import Figure

    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **options: file.write(b"not drawn"))


OWN_NORMALISER = """
from pydantic import Field
from torch import Tensor

from normalisers.base import RowContext
from normalisers.family import Softmax

class Mine(Softmax, name="mine"):
    beta: float = Field(0.5, ge=0, description="How much sharper scores get with ln n.")

    def factor(self, context: RowContext) -> Tensor | float:
        return (1 + self.beta * context.n.log()) * super().factor(context)
"""


@pytest.fixture
def own_file(tmp_path):
    """A file with a normaliser of its own, mine.py:Mine."""
    path = tmp_path / "mine.py"
    path.write_text(OWN_NORMALISER)
    return path


SWEEP = """
[sweep]
"attention.normaliser" = ["softmax", "lssa"]
seed = [1, 2]
"""


@pytest.fixture
def four_runs(tiny_config):
    """A sweep of the tiny config, s.toml, whose runs go to tmp_path/runs."""
    path = tiny_config.with_name("s.toml")
    path.write_text(tiny_config.read_text() + SWEEP)
    return path


@pytest.fixture
def call(monkeypatch):
    """A script's main() with these arguments, in this process."""

    def main(script, *args):
        monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, args)])
        script.main()

    return main


def save_run(folder, config, model, step=1):
    """A run folder with a checkpoint of the model, whose tokens are bytes."""
    from training.checkpoint import save_checkpoint

    state = {"step": step, "config": config.model_dump(), "model": model.state_dict()}
    state |= {"optimizers": [], "rng": [], "data": {"tokenizer": "bytes"}}
    save_checkpoint(folder, state, keep_last=9)
    return folder


FAMILIES = {  # overrides of models that transformers has, too
    "llama": ["--model.norm", "rmsnorm", "--model.mlp", "swiglu", "--model.mlp-hidden", "48"],
    "llama grouped": ["--model.norm", "rmsnorm", "--model.mlp", "swiglu", "--model.n-kv-head", "1"],
    "neox": ["--model.gelu", "tanh"],
    "neox exact": ["--model.gelu", "exact"],
}


def make_byte_run(tiny_config, *overrides):
    """A run of a byte-level model with random weights, norms and biases too."""
    import torch

    from config import load_config
    from model import GPT

    common = ["--model.vocab-size", "257", "--model.rope-theta", "5000.0"]
    config = load_config(tiny_config, [*common, *overrides])
    torch.manual_seed(0)
    model = GPT(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape))
    return save_run(config.run_dir, config, model)
