"""Local files as the text of an evaluation: each model's own tokeniser, in memory.

A prepared dataset has tokens of one tokeniser, below 65,536. Here each document is tokenised as it
is read, for as many blocks as the evaluation takes.
"""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from data.batches import document_blocks
from data.dataset import TokenStream
from data.documents import Cursor, Source, local_files, read_blocks
from data.tokenizer import encode
from evaluation import Blocks, open_blocks
from infra.cli import UserError


class FileText(TokenStream):
    """Documents in memory, in the place of a prepared dataset.

    tokens, sizes: (n_tokens,) int64; before each document its end-of-text token, of no bytes.
    """

    def __init__(self, name: str, files: list[str], tokenizer: str) -> None:
        self.folder = Path(name)
        self.split = "files"
        self.info = {"tokenizer": tokenizer}
        self.mask = None
        self.identity = sha256("".join(files).encode()).hexdigest()
        self.starts = np.empty(0, np.int64)
        self.tokens = np.empty(0, np.int64)
        self.sizes = np.empty(0, np.int64)

    def set_documents(self, documents: list[tuple[list[int], list[int]]], eot: int) -> None:
        """Of each document its tokens and their bytes."""
        lengths = [1 + len(tokens) for tokens, _ in documents]
        self.starts = np.cumsum([0, *lengths])[:-1]
        self.tokens = np.concatenate([[eot, *tokens] for tokens, _ in documents])
        self.sizes = np.concatenate([[0, *sizes] for _, sizes in documents])
        self.n_tokens = len(self.tokens)

    def read(self, start: int, length: int) -> np.ndarray:
        return self.tokens[start : start + length]

    def n_bytes(self, start: int, length: int) -> int:
        return int(self.sizes[start : start + length].sum())

    def document_starts(self) -> np.ndarray:
        return self.starts

    @property
    def fingerprint(self) -> str:
        """Of the files, whatever the tokeniser."""
        return f"sha256 {self.identity}"


def open_files(
    runs: Sequence[Any], patterns: list[str], length: int, n_tokens: int
) -> list[Blocks]:
    """The blocks of each run, whose text is tokenised once for each tokeniser.

    With several tokenisers they are at the ends of the documents that are long enough in all.

    Raises UserError: a file or a tokeniser cannot be read, there is no text, or a token is beyond a
    model's vocabulary.
    """
    source = local_files(patterns, "text")
    texts: dict[str, FileText] = {}
    for run in runs:
        if run.tokenizer not in texts:
            text = FileText(patterns[0], source.files, run.tokenizer)
            tokenizer = run.load_tokenizer()
            documents = tokenise(source, tokenizer, length, n_tokens)
            if not documents:
                raise UserError(f"--files {patterns[0]}: no text")
            text.set_documents(documents, tokenizer.eot_token)
            texts[run.tokenizer] = text
        largest = int(texts[run.tokenizer].tokens.max())
        if largest >= run.vocab_size:
            expected = f"expected tokens below {run.vocab_size}, the model's vocabulary"
            raise UserError(f"{run.source}: its tokenizer gives token {largest}: {expected}")
    if len(texts) == 1:
        return [open_blocks(text, length, n_tokens) for text in texts.values()] * len(runs)
    starts = {
        name: {document: start for start, document in document_blocks(text, length)}
        for name, text in texts.items()
    }
    common = sorted(set.intersection(*map(set, starts.values())))[: n_tokens // length]
    if not common:
        raise UserError(f"--files {patterns[0]}: no document of {length} tokens in each tokeniser")
    return [
        Blocks(texts[run.tokenizer], length, [starts[run.tokenizer][n] for n in common], common)
        for run in runs
    ]


def tokenise(
    source: Source, tokenizer: Any, length: int, n_tokens: int
) -> list[tuple[list[int], list[int]]]:
    """The tokens of each document and their bytes, until enough are as long as a block."""
    documents = []
    n_long = 0
    for block in read_blocks(source.open(), Cursor()):
        for text in filter(None, block.texts):
            documents.append(tokens_and_bytes(tokenizer, text))
            n_long += len(documents[-1][0]) >= length
            if n_long >= n_tokens // length:
                return documents
    return documents


def tokens_and_bytes(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """The tokens of a text, without any around it, and how many of its bytes each begins."""
    if isinstance(tokenizer, tiktoken.Encoding):
        tokens = encode(tokenizer, text).tolist()
        return tokens, [len(part) for part in tokenizer.decode_tokens_bytes(tokens)]
    encoding = tokenizer.inner.encode(text, add_special_tokens=False)
    starts = [start for start, _ in encoding.offsets]  # in characters
    ends = [*starts[1:], len(text)]
    return encoding.ids, [
        len(text[start:end].encode()) for start, end in zip(starts, ends, strict=True)
    ]
