"""The tokenisers: "gpt2" (50257 tokens) and "bytes" (257 tokens, needs no download).

Both are tiktoken `Encoding`s: `encode_ordinary(text)`, `decode(tokens)`, `n_vocab`, `eot_token`.
"""

import numpy as np
import tiktoken

from infra.cli import UserError

TOKENIZERS = {"bytes": 257, "gpt2": 50257}  # with their number of tokens


def get_tokenizer(name: str) -> tiktoken.Encoding:
    """The tokeniser called "gpt2" or "bytes".

    tiktoken downloads gpt2 once (1.5 MB) and keeps it in the folder that TIKTOKEN_CACHE_DIR names.

    Raises:
        UserError: an unknown name, or gpt2's files are neither cached nor can be downloaded.
    """
    if name not in TOKENIZERS:
        raise UserError(f"tokenizer {name!r}: expected one of {', '.join(TOKENIZERS)}")
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
        reason = " ".join(str(e).split())[:160]
        raise UserError(
            f"tokenizer 'gpt2': its files could not be fetched ({type(e).__name__}: {reason}); set "
            "TIKTOKEN_CACHE_DIR to a folder that has them, or use the tokenizer 'bytes'"
        ) from None


def encode(encoding: tiktoken.Encoding, text: str) -> np.ndarray:
    """The tokens of `encode_ordinary`, (n,) uint16, without a list of Python integers.

    Text that overflows the stack of tiktoken's regex engine, such as a million spaces and a word, is encoded
    in halves. The tokens decode to the same text.
    """
    try:
        return encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint16)
    except ValueError:
        if len(text) < 2:
            raise
        half = len(text) // 2
        return np.concatenate([encode(encoding, text[:half]), encode(encoding, text[half:])])
