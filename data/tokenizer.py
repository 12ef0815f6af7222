"""The tokenisers: "gpt2" (50257 tokens), "bytes" (257, needs no download), or a tokenizer.json.

The first two are tiktoken `Encoding`s. `FileTokenizer` has what is used of one here:
`encode_ordinary(text)`, `decode(tokens)`, `decode_bytes(tokens)`, `name`, `n_vocab`, `eot_token`.
"""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tiktoken

from infra.cli import UserError
from infra.files import read_text

TOKENIZERS = {"bytes": 257, "gpt2": 50257}  # with their number of tokens
FILE_NAME = "tokenizer.json"
ENDS = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>")  # names of the end-of-text token


class FileTokenizer:
    """A tokenizer.json of the `tokenizers` library, without what it adds around a text.

    Raises UserError: another kind of file, no end-of-text token that no text contains, above 65,536
    tokens.
    """

    def __init__(self, content: str, where: object) -> None:
        from tokenizers import Tokenizer

        try:
            self.inner = Tokenizer.from_str(content)
        except Exception as e:  # the library raises no other
            expected = "expected a tokenizer.json of the tokenizers library"
            raise UserError(f"{where}: {expected}: {e}") from None
        self.inner.encode_special_tokens = True  # special tokens in a text are ordinary text
        self.inner.no_padding()
        self.inner.no_truncation()
        self.content = content  # from which it can be made again
        self.name = file_identity(content)
        vocabulary = self.inner.get_vocab()
        self.n_vocab = 1 + max(vocabulary.values(), default=0)
        end = next((end for end in ENDS if end in vocabulary), None)
        problem = ""
        if getattr(self.inner.model, "dropout", None):
            problem = (
                f"model.dropout {self.inner.model.dropout:g}: expected 0, one way to cut a text"
            )
        elif self.n_vocab > 65536:
            problem = f"{self.n_vocab:,} tokens: expected at most 65,536, as shards hold"
        elif end is None:
            problem = f"no end-of-text token: expected a special token {' or '.join(ENDS)}"
        else:
            self.eot_token: int = vocabulary[end]
            if self.eot_token in self.encode_ordinary(end):
                problem = f"the text {end} is its end-of-text token: expected a special token"
        if problem:
            raise UserError(f"{where}: {problem}")

    def encode_ordinary(self, text: str) -> list[int]:
        try:
            return self.inner.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except Exception as e:  # the library raises no other
            raise UserError(f"{self.name}: {e}") from None

    def decode(self, tokens: Sequence[int]) -> str:
        return self.inner.decode(list(tokens), skip_special_tokens=False)

    def decode_bytes(self, tokens: Sequence[int]) -> bytes:
        return self.decode(tokens).encode()


Tokenizer = tiktoken.Encoding | FileTokenizer


def file_identity(content: str) -> str:
    return f"tokenizer-{hashlib.sha256(content.encode()).hexdigest()[:16]}"


def get_tokenizer(name: str, content: str = "") -> Tokenizer:
    """The tokeniser called "gpt2" or "bytes", or that of a tokenizer.json.

    tiktoken downloads gpt2 once (1.5 MB) and keeps it in the folder that TIKTOKEN_CACHE_DIR names.

    With the `content` of a tokenizer.json that was read before, the name is its identity, else its
    path. Raises UserError: an unknown name, see `FileTokenizer`, or gpt2's files are not to be had.
    """
    if content:
        return FileTokenizer(content, name)
    if name.endswith(".json") and Path(name).is_file():
        return FileTokenizer(read_text(Path(name)), name)
    if name not in TOKENIZERS:
        raise UserError(f"tokenizer {name!r}: expected {', '.join(TOKENIZERS)} or a tokenizer.json")
    if name == "bytes":
        return tiktoken.Encoding(
            "bytes",
            pat_str=r"[\s\S]{1,64}",  # any cut will do: there are no merges
            mergeable_ranks={bytes([i]): i for i in range(256)},
            special_tokens={"<|endoftext|>": 256},
        )
    try:
        return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError, ImportError) as e:  # requests' exceptions are OSErrors
        reason = f"its files could not be fetched ({' '.join(str(e).split())[:160]})"
        expected = "set TIKTOKEN_CACHE_DIR to a folder that has them, or use the tokenizer 'bytes'"
        raise UserError(f"tokenizer 'gpt2': {reason}; {expected}") from None


def encode(encoding: Tokenizer, text: str) -> np.ndarray:
    """The tokens of `encode_ordinary`, (n,) uint16, without a list of Python integers.

    Text that overflows the stack of tiktoken's regex engine, such as a million spaces and a word,
    is encoded in halves. The tokens decode to the same text.
    """
    if isinstance(encoding, FileTokenizer):
        return np.array(encoding.encode_ordinary(text), np.uint16)
    try:
        return encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)
    except ValueError:
        if len(text) < 2:
            raise
        half = len(text) // 2
        return np.concatenate([encode(encoding, text[:half]), encode(encoding, text[half:])])


def train_bpe(texts: Iterable[str], n_vocab: int) -> str:
    """The content of a tokenizer.json with at most `n_vocab` tokens; fewer if the texts have fewer
    merges.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab,
        special_tokens=list(ENDS[:1]),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str(pretty=True))
