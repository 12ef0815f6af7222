"""Prepare SQuAD 2.0 for supervised fine-tuning (SSMax, Section 3.3 and Appendix C).

    python -m lab.squad                      # from the hub -> data/squad
    python -m lab.squad --source my_folder   # what `datasets` loads from it, with the same columns
    python -m lab.squad --tokenizer bytes --seq-len 512 --shorten     # for small models

Every question whose context, question and answer are not empty (86,820 in the paper) becomes one
sequence of --seq-len tokens, which train.seq_len must equal:

    <|endoftext|>{context}

    Question: {question}
    Answer: {answer}<|endoftext|>, and zeros to the end

Only the first answer and the end-of-text after it are learned, with --answer-only the answer alone,
as in the paper. Then the model does not learn where to stop. A second pair of splits, trainmask and
valmask, holds 1 for each token that counts in the loss and 0 for the others. Longer sequences are
left out and counted. With --shorten their context is cut on both sides, so that they fit and the
answer stays at the same share of it.

Writes squad_val_000000.bin, squad_train_000001.bin, the masks, and at the end dataset.json (format:
data/shards.py). Train on it with configs/papers/ssmax_sft.toml.
"""

import argparse
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.dataset import begin_dataset, finish_dataset, made_before, write_split
from data.documents import naming
from data.tokenizer import Tokenizer, get_tokenizer
from evaluation import progress
from infra.cli import ArgumentParser, UserError, integer, run_main
from infra.files import exclusive_lock

DATASET = "squad"


class Sequence(NamedTuple):
    """One window of training: (T,) uint16 each."""

    tokens: np.ndarray
    mask: np.ndarray  # 1 for each token that counts in the loss


def question_prompt(context: str, question: str) -> str:
    """The prompt that an answer, with a space before it, continues: also that of the needle test."""
    return f"{context}\n\nQuestion: {question}\nAnswer:"


def shortened(row: dict[str, Any], share: float) -> dict[str, Any]:
    """The row with that share of its context's characters, or those of the answer alone if they are
    more.
    """
    context = row["context"]
    start = row["answers"]["answer_start"][0]
    length = len(row["answers"]["text"][0])
    width = max(length, round(share * len(context)))
    place = start / max(1, len(context) - length)
    begin = round(place * (len(context) - width))
    return {**row, "context": context[begin : begin + width]}


# ---------------------------------------------------------------- writing
def fit_sequence(
    row: dict[str, Any],
    tokenizer: Tokenizer,
    seq_len: int,
    shorten: bool,
    answer_only: bool = False,
) -> Sequence | None:
    """As `make_sequence`; `shorten`: of the largest share of the context, in steps of 5 %, that
    fits.
    """
    shares = range(100, 0, -5) if shorten else [100]
    for percent in shares:
        shorter = shortened(row, percent / 100) if percent < 100 else row
        sequence = make_sequence(shorter, tokenizer, seq_len, answer_only)
        if sequence is not None:
            return sequence
    return None


def make_sequence(
    row: dict[str, Any], tokenizer: Tokenizer, seq_len: int, answer_only: bool
) -> Sequence | None:
    """None if the question does not fit. answer_only: the end-of-text after the answer is not
    learned.
    """
    eot = tokenizer.eot_token
    prompt = [eot, *tokenizer.encode_ordinary(question_prompt(row["context"], row["question"]))]
    answer = [*tokenizer.encode_ordinary(f" {row['answers']['text'][0]}"), eot]
    end = len(prompt) + len(answer)
    if end > seq_len:
        return None
    sequence = answered(prompt, answer, seq_len)
    if answer_only:
        sequence.mask[end - 1] = 0
    return sequence


def answered(prompt: list[int], answer: list[int], seq_len: int) -> Sequence:
    """Both, and zeros to the end. The answer alone is learned."""
    start = len(prompt)
    stop = start + len(answer)
    tokens = np.zeros(seq_len, np.uint16)
    tokens[:stop] = prompt + answer
    mask = np.zeros(seq_len, np.uint16)
    mask[start:stop] = 1
    return Sequence(tokens, mask)


def check_columns(found: dict[str, list[str]], source: str) -> None:
    """Raises UserError: a split or a column is missing."""
    for split, column in product(("train", "validation"), ("context", "question", "answers")):
        if column not in found.get(split, []):
            raise UserError(f"{source}: found {found}: expected {column} in {split}")


def is_complete(row: dict[str, Any]) -> bool:
    texts = [row["context"], row["question"], *row["answers"]["text"][:1]]
    return len(texts) == 3 and all(text.strip() for text in texts)


def write_masked(
    out: Path,
    info: dict[str, Any],
    splits: dict[str, list[Sequence]],
    n_documents: int = 1,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Write the sequences of all splits, then their masks.

    Args:
        info: keys of dataset.json. Those of the shards are added.
        n_documents: in a sequence, for dataset.json.
        tokenizer: see `finish_dataset`.
    """
    listed = {"sequence_length": len(splits["train"][0].tokens), **info, "splits": {}, "shards": []}
    begin_dataset(out, info["dataset"])
    for split, sequences in splits.items():
        n = n_documents * len(sequences)
        write_split(out, listed, split, [sequence.tokens for sequence in sequences], n)
    for split, sequences in splits.items():
        write_split(out, listed, f"{split}mask", [sequence.mask for sequence in sequences], 0)
    finish_dataset(out, listed, tokenizer)
    print(f"written {out}")


def main() -> None:
    args = parse_args()
    tokenizer = get_tokenizer(args.tokenizer)  # an error here leaves the folder unchanged
    import datasets

    settings = {key: value for key, value in vars(args).items() if key != "out"}
    settings["tokenizer"] = tokenizer.name
    if made_before(args.out, DATASET, settings):
        return
    with naming(args.source, "; --source may also be a folder"):
        dataset = datasets.load_dataset(args.source)
    check_columns({split: rows.column_names for split, rows in dataset.items()}, args.source)
    splits: dict[str, list[Sequence]] = {}
    options = (tokenizer, args.seq_len, args.shorten, args.answer_only)
    for split, theirs in (("val", "validation"), ("train", "train")):
        complete = [row for row in dataset[theirs] if is_complete(row)]
        sequences = [fit_sequence(row, *options) for row in progress(complete, split)]
        splits[split] = [sequence for sequence in sequences if sequence is not None]
        n = len(splits[split])
        n_longer = len(sequences) - n
        if not n:
            raise UserError(f"{args.source}: {split}: no question fits --seq-len {args.seq_len}")
        print(f"{split:6} {n:,} questions in {args.seq_len} tokens each, {n_longer:,} were longer")
    # The zeros after an end-of-text are a document, too.
    info = {"dataset": DATASET, "source": args.source, "settings": settings}
    info |= {"shortened": args.shorten, "answer_only": args.answer_only}
    with exclusive_lock(args.out):
        write_masked(args.out, info, splits, 2, tokenizer)


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add(
        "--source",
        default="rajpurkar/squad_v2",
        help="on the hub, or a folder (default: %(default)s)",
    )
    add("--tokenizer", default="gpt2", help="gpt2, bytes or a tokenizer.json (default: gpt2)")
    length_help = "of every sequence (default: %(default)s)"
    add("--seq-len", type=integer(2, 2**20), default=1024, metavar="T", help=length_help)
    add(
        "--shorten",
        action="store_true",
        help="cut the contexts of longer questions around the answer",
    )
    add("--answer-only", action="store_true", help="leave the end-of-text out of the loss")
    default = Path("data") / DATASET
    add(
        "--out",
        type=Path,
        metavar="DIR",
        default=default,
        help="folder to write (default: data/squad)",
    )
    return parser.parse_args()


if __name__ == "__main__":
    run_main(main)
