"""What evaluations share: options, the models of run folders, scored text, work shared by ranks.

An evaluation opens all runs and their text before the first model is loaded, scores one run after
the other, and writes its sets of rows (see measure.py) as soon as a run is done.
"""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from data.batches import document_blocks, val_windows
from data.dataset import TokenStream
from data.tokenizer import Tokenizer, get_tokenizer
from infra.cli import ArgumentParser, UserError, positive_int
from infra.distributed import World
from measure import name_model, read_rows
from model import GPT
from positions import UNSCALED, RopeScaling
from schema import Config
from training.checkpoint import find_checkpoints, load_model, load_source, read_config

FACTORS = (1, 2, 4, 8, 16)  # multiples of the training length: the default lengths
LOG_SECONDS = 10.0  # between lines of progress where the output is no terminal
LOGITS_AT_ONCE = 1024  # positions whose logits exist together: 0.2 GB for GPT-2's vocabulary


# ---------------------------------------------------------------- options
def add_arguments(parser: ArgumentParser, tokens: int = 2**20) -> None:
    """The options of every evaluation."""
    parser.usage = "%(prog)s RUN [RUN ...] [options]"
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="run folders or checkpoint files, first")
    add("--data", type=Path, metavar="DIR", help="dataset (default: that of each run's config)")
    split_help = "(default: test, if the dataset has it)"
    add("--split", choices=("val", "test"), help=split_help)
    tokens_help = "at most N tokens, in whole blocks (default: %(default)s)"
    add("--tokens", type=positive_int, default=tokens, metavar="N", help=tokens_help)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)")


# ---------------------------------------------------------------- models
class Scorer(Protocol):
    """What an evaluation of losses asks of a model: of ours (`GPTScorer`), or of any other causal one."""

    def losses(
        self,
        tokens: Tensor,
        n_targets: int,
        window: int = 0,
        sinks: int = 0,
        scaling: RopeScaling = UNSCALED,
    ) -> Tensor:
        """The losses in nats of the last n_targets of tokens (B, N), (B, n_targets) float32.

        The tokens are int64 on the CPU; the losses are where the model is. A target is given all
        tokens of its row before it: 1 <= n_targets < N, with positions from 0. Logits exist for a
        bounded number of positions at a time.

        Args:
            window: if above 0, each layer sees the last `window` keys alone, at their positions in
                the row, as a decoder with a KV cache of that many does.
            sinks: with a window, the first `sinks` keys of the row as well, at their positions
                (Xiong et al. 2023, arXiv 2309.17453).
            scaling: of RoPE, for a length of N - 1.
        Raises:
            UserError: the model cannot, as with more positions than it has. Its rows have no value.
        """


class GPTScorer:
    """Our model as a `Scorer`."""

    def __init__(self, model: GPT) -> None:
        self.model = model
        self.with_window = cache(model.with_window)

    def losses(
        self,
        tokens: Tensor,
        n_targets: int,
        window: int = 0,
        sinks: int = 0,
        scaling: RopeScaling = UNSCALED,
    ) -> Tensor:
        if sinks:
            raise UserError(
                "--sinks: our engines have none; python -m hub.export RUN DIR, then DIR"
            )
        tokens = tokens.to(self.model.embedding.weight.device)
        inputs = tokens[:, :-1]
        targets = tokens[:, -n_targets:]
        # a window that reaches all keys has no effect
        model = self.with_window(window) if 0 < window < inputs.shape[1] else self.model
        chunk = max(1, LOGITS_AT_ONCE // len(tokens))
        with model.autocast():
            return model.token_losses(inputs, targets, rope=scaling, chunk=chunk)


# ---------------------------------------------------------------- runs
@dataclass(frozen=True)
class Run:
    """A model to evaluate, and the folder of its rows."""

    source: Path  # as given: run folder or checkpoint file
    folder: Path
    config: Config
    tokenizer: str  # its name
    is_absolute = False  # has learned positions, so that a window cannot roll

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def title(self) -> str:
        return name_model(self.config)

    @property
    def train_len(self) -> int:
        return self.config.train.seq_len

    @property
    def size(self) -> str:
        """What makes its loss another than that of a run beside it, whatever its attention."""
        model = self.config.model
        train = self.config.train
        batches = f"batches of {train.batch_tokens} tokens, T = {train.seq_len}"
        return f"{model.n_layer} layers of {model.n_embd}, {batches}"

    @cached_property
    def step(self) -> int:
        """Of the checkpoint that is there now."""
        path, content = load_source(self.source, lazily=True)
        return int(content["step"])

    def load(self, world: World) -> tuple[GPT, int]:
        """The model on this rank's device, and its step.

        Raises UserError: the model does not load, or the ranks got different checkpoints.
        """
        trained = load_model(self.source, world.device)
        if not world.agree(trained.step):
            raise UserError(f"{self.source}: got a new checkpoint while it was read; try again")
        return trained.model, trained.step

    def scorer(self, world: World) -> tuple[Scorer, int]:
        """The model for an evaluation of losses, and its step. Raises UserError: see `load`."""
        model, step = self.load(world)
        return GPTScorer(model), step

    @property
    def vocab_size(self) -> int:
        return self.config.model.vocab_size

    def text(self, folder: Path | None, split: str | None) -> TokenStream:
        """The held-out tokens, of its own data by default. Raises UserError: see `open_text`."""
        return open_text(self.config, folder, self.tokenizer, split)

    def load_tokenizer(self) -> Tokenizer:
        _, content = load_source(self.source, lazily=True)
        return get_tokenizer(self.tokenizer, content.get("tokenizer", ""))

    def scalings(self, asked: Iterable[RopeScaling]) -> list[RopeScaling]:
        """Those that make a difference to it: one without rotating positions has no scaling."""
        return list(asked) if self.config.rope_bases else [RopeScaling()]


def open_runs(
    sources: Sequence[Path],
    world: World | None = None,
    train_len: int | None = None,
    has_files: bool = False,
) -> list[Run]:
    """Check every source without its tensors, since ten models may not fit in memory.

    Folders without a checkpoint are skipped with a line, unless all are. world: None where rows are
    read alone. train_len: if given, models of transformers are runs, too, with this training length;
    0 is their config's. has_files: the text is not tokenised yet. Raises UserError: a source does
    not load, its folder cannot be written or has a damaged rows.csv, or the runs have several
    tokenizers for one tokenised text.
    """
    others = [source for source in sources if train_len is not None and is_of_transformers(source)]
    trained = [
        source
        for source in sources
        if not source.is_dir() or source in others or find_checkpoints(source)
    ]
    runs: list[Run] = []
    for source in dict.fromkeys(sources):
        if trained and source not in trained:
            if world is None or world.is_main:
                print(f"skipped: {source} has no checkpoint")
            continue
        run = open_other(source, train_len) if source in others else open_run(source)
        read_rows(run.folder)  # before the work: the new rows are added to it
        if world is not None and not os.access(run.folder, os.W_OK):
            raise UserError(f"{run.folder}: cannot be written; the results go there")
        runs.append(run)
        if run.tokenizer != runs[0].tokenizer and not has_files:
            has = f"{runs[0].tokenizer}, as {runs[0].source} has"
            why = "losses of both do not compare; --files gives each its own"
            raise UserError(f"{source}: tokens of {run.tokenizer}: expected {has}: {why}")
    return runs


def open_run(source: Path) -> Run:
    config, tokenizer = read_config(source)
    # not resolved: rows of a link stay where it is
    folder = Path(os.path.abspath(source if source.is_dir() else source.parent))
    if folder.name == "checkpoints" and not source.is_dir():
        folder = folder.parent
    return Run(source, folder, config, tokenizer)


def is_of_transformers(source: Path) -> bool:
    """Whether it is a folder with a config.json, or reads as a name on transformers' hub."""
    is_name = len(source.parts) == 2 and not source.is_absolute() and not source.parent.exists()
    return (source / "config.json").is_file() or is_name


def open_other(source: Path, train_len: int | None) -> Any:
    """A model of transformers in the place of a `Run`. Raises UserError: see `load_hub` and
    hub/causal.py.
    """
    return load_hub("causal").open_run(str(source), train_len)


def load_hub(module: str) -> Any:
    """A module of hub/, which core does not know. Raises UserError: it is not there."""
    package = __name__.removesuffix("evaluation")  # "", or that of an installed package
    try:
        return import_module(f"{package}hub.{module}")
    except ModuleNotFoundError as e:
        raise UserError(f"hub/{module}.py: cannot be imported: no {e.name}") from None


def picture_path(runs: Sequence[Run], name: str) -> Path:
    """<name>.png in the run's folder, or in the deepest one that has all of them."""
    folders = list(dict.fromkeys(run.folder for run in runs))
    common = Path(os.path.commonpath(folders))
    if len(runs) == 1 and not runs[0].source.is_dir():
        name += f"_{runs[0].source.stem}"
    # the root of the file system is nobody's
    return (common if common.name else folders[0]) / f"{name}.png"


# ---------------------------------------------------------------- text
def open_text(
    config: Config, folder: Path | None, tokenizer: str | None = None, split: str | None = None
) -> TokenStream:
    """The held-out tokens, checked against the model's vocabulary and the tokenizer that it was
    trained on.

    split: None is test, if the dataset has it, else val. Raises UserError: missing, damaged, masked
    for fine-tuning, or tokens of another tokenizer.
    """
    folder = folder or Path(config.data.dir)
    if not folder.is_dir() and folder == Path(config.data.dir):
        raise UserError(f"{folder}: no such data folder; expected the run's data, or --data DIR")
    return open_stream(folder, config.model.vocab_size, tokenizer, split)


def open_stream(
    folder: Path, vocab_size: int, tokenizer: str | None, split: str | None
) -> TokenStream:
    """As `open_text`, of a folder that is named."""
    has_test = folder.is_dir() and any(folder.glob("*_test_[0-9]*.bin"))
    stream = TokenStream(folder, split or ("test" if has_test else "val"))
    stream.check_model(vocab_size)
    theirs = stream.info["tokenizer"]
    if theirs != (tokenizer or theirs):
        raise UserError(
            f"{folder}: tokens of {theirs}: expected {tokenizer}, the model's tokenizer"
        )
    if stream.mask is not None:
        raise UserError(f"{folder}: made for fine-tuning, no running text; expected other --data")
    return stream


def text_of(stream: TokenStream) -> str:
    """The column `text` of a stream's rows."""
    return stream.fingerprint.removeprefix("sha256 ")[:12]


@dataclass(frozen=True)
class Blocks:
    """Blocks of one length of a text: where each starts, and the number of its document."""

    stream: TokenStream
    length: int
    starts: list[int]
    documents: list[int]

    def __len__(self) -> int:
        return len(self.starts)


def open_blocks(stream: TokenStream, length: int, n_tokens: int) -> Blocks:
    """One block a document, at its end, as far as `n_tokens` tokens go.

    If consecutive blocks from the first token on would show more documents, since few are that
    long, those; their document is the last that has begun by the block's end.
    Raises UserError: n_tokens or the stream is shorter than one block.
    """
    if n_tokens < length:
        raise UserError(f"--tokens {n_tokens}: expected at least {length}, the longest length")
    starts = [i * length for i in range(val_windows(stream, n_tokens, length))]
    begun = stream.document_starts().searchsorted([start + length for start in starts])
    documents = [max(0, int(n) - 1) for n in begun]
    at_ends = document_blocks(stream, length)[: n_tokens // length]
    if len(at_ends) >= len({*documents}):
        starts, documents = map(list, zip(*at_ends, strict=True))
    return Blocks(stream, length, starts, documents)


# ---------------------------------------------------------------- scores
def progress(items: Sequence[Any], label: str, is_shown: bool = True) -> "tqdm[Any]":
    """The items, with progress and the time left on stderr: one line of a terminal, lines of a log."""
    is_terminal = sys.stderr.isatty()
    seconds = 0.1 if is_terminal else LOG_SECONDS
    line = None if is_terminal else "{desc}: {n_fmt}/{total_fmt}, {remaining} left\n"
    return tqdm(
        items, label, leave=False, delay=seconds, mininterval=seconds, bar_format=line,
        disable=not is_shown,
    )  # fmt: skip


def score_all(
    world: World, label: str, n_items: int, score: Callable[[Sequence[int]], Tensor], batch: int = 1
) -> Tensor | str:
    """All items' scores, in order, the same on every rank. Each rank takes its share of the items.

    Args:
        score: of the items with these numbers, at most `batch`: (n, ...).
    Returns:
        (n_items, ...) float64 on the CPU; or why there are none. Then the model rejects the input
        (ssmax_pn, whose p_n ends at the training length), or a score is not finite.
    """
    own = range(world.rank, n_items, world.size)
    scores: dict[int, Tensor] = {}
    reason = ""
    try:
        for i in progress(range(0, len(own), batch), label, world.is_main):
            items = own[i : i + batch]
            scores |= zip(items, score(items).double().cpu(), strict=True)
    except UserError as e:  # every rank still joins the collective
        reason = str(e)
    for theirs, their_reason in world.gather_objects((scores, reason)):
        scores |= theirs
        reason = reason or their_reason
    if reason:
        return reason
    in_order = torch.stack([scores[i] for i in range(n_items)])
    return in_order if in_order.isfinite().all() else "the model computed NaN or infinity"
