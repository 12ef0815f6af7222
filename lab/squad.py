"""Prepare SQuAD 2.0 for supervised fine-tuning (SSMax, Section 3.3 and Appendix C).

    python -m lab.squad                                              # from the hub -> data/squad
    python -m lab.squad --train train-v2.0.json --val dev-v2.0.json  # local files in SQuAD's schema

Every question whose context, question and answer are not empty (86,820 in the paper) becomes one sequence of
--seq-len tokens, which train.seq_len must equal:

    <|endoftext|>{context}

    Question: {question}
    Answer: {answer}<|endoftext|>, and zeros to the end

Only the first answer and the end-of-text after it are learned. A second pair of splits, trainmask and
valmask, holds 1 for each token that counts in the loss and 0 for the others. Longer sequences are left out
and counted.

Writes squad_val_000000.bin, squad_train_000001.bin, the masks, and at the end dataset.json (format:
data/shards.py). Train on it with configs/ssmax_paper/sft.toml.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiktoken

from data.dataset import begin_dataset, finish_dataset, write_split
from data.documents import naming
from data.tokenizer import TOKENIZERS, get_tokenizer
from infra.cli import ArgumentParser, UserError, run_main
from infra.files import exclusive_lock, read_json

DATASET = "squad"
HUB_NAME = "rajpurkar/squad_v2"


class Sequence(NamedTuple):
    """One window of training: (T,) uint16 each."""

    tokens: np.ndarray
    mask: np.ndarray  # 1 for each token that counts in the loss


class Question(NamedTuple):
    context: str
    question: str
    answer: str

    @property
    def is_complete(self) -> bool:
        return all(text.strip() for text in (self.context, self.question, self.answer))


def question_prompt(context: str, question: str) -> str:
    """The prompt that an answer, with a space before it, continues: also that of the needle test."""
    return f"{context}\n\nQuestion: {question}\nAnswer:"


# ---------------------------------------------------------------- reading
def read_questions(path: Path) -> Iterator[Question]:
    """The questions with an answer in a file of SQuAD's schema.

    Raises:
        UserError: the file cannot be read or has another schema.
    """
    content = read_json(path)
    try:
        for article in content["data"]:
            for paragraph in article["paragraphs"]:
                for qa in paragraph["qas"]:
                    for answer in qa["answers"][:1]:
                        yield Question(paragraph["context"], qa["question"], answer["text"])
    except (KeyError, TypeError) as e:
        raise UserError(
            f"{path}: not of SQuAD's schema, {{data: [{{paragraphs: [{{context, qas: [{{question, answers: "
            f"[{{text}}]}}]}}]}}]}} ({type(e).__name__}: {e})"
        ) from None


def from_hub() -> dict[str, list[Question]]:
    """The questions with an answer of both splits; offline from the cache of `datasets`."""
    import datasets

    hint = "; without a network give SQuAD's own files: --train train-v2.0.json --val dev-v2.0.json"
    with naming(f"{HUB_NAME} on the hub", hint):
        dataset = datasets.load_dataset(HUB_NAME)
        return {
            split: [
                Question(row["context"], row["question"], answer)
                for row in dataset[hub_split]
                for answer in row["answers"]["text"][:1]
            ]
            for split, hub_split in (("val", "validation"), ("train", "train"))
        }


# ---------------------------------------------------------------- writing
def make_sequence(question: Question, tokenizer: tiktoken.Encoding, seq_len: int) -> Sequence | None:
    """None if the question does not fit."""
    prompt = tokenizer.encode_ordinary(question_prompt(question.context, question.question))
    answer = tokenizer.encode_ordinary(f" {question.answer}")
    start = 1 + len(prompt)
    stop = start + len(answer) + 1
    if stop > seq_len:
        return None
    tokens = np.zeros(seq_len, np.uint16)
    tokens[:stop] = [tokenizer.eot_token, *prompt, *answer, tokenizer.eot_token]
    mask = np.zeros(seq_len, np.uint16)
    mask[start:stop] = 1
    return Sequence(tokens, mask)


def write_masked(
    out: Path, info: dict[str, Any], splits: dict[str, list[Sequence]], n_documents: int = 1
) -> None:
    """Write the sequences of all splits, then their masks.

    Args:
        info: keys of dataset.json. Those of the shards are added.
        n_documents: that data/verify.py finds in a sequence.
    """
    listed = {"sequence_length": len(splits["train"][0].tokens), **info, "splits": {}, "shards": []}
    begin_dataset(out, info["dataset"])
    for split, sequences in splits.items():
        n = n_documents * len(sequences)
        write_split(out, listed, split, [sequence.tokens for sequence in sequences], n)
    for split, sequences in splits.items():
        write_split(out, listed, f"{split}mask", [sequence.mask for sequence in sequences], 0)
    finish_dataset(out, listed)
    print(f"written {out}")


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("--train", type=Path, metavar="FILE", help="a local JSON (default: the dataset on the hub)")
    add("--val", type=Path, metavar="FILE", help="another, to validate on")
    add("--tokenizer", choices=TOKENIZERS, default="gpt2", help="(default: %(default)s)")
    add("--seq-len", type=int, default=1024, metavar="T", help="of every sequence (default: %(default)s)")
    default = Path("data") / DATASET
    add("--out", type=Path, metavar="DIR", default=default, help="folder to write (default: data/squad)")
    args = parser.parse_args()
    if (args.val is None) != (args.train is None):
        raise UserError("--train and --val: expected both or none")
    return args


def main() -> None:
    args = parse_args()
    tokenizer = get_tokenizer(args.tokenizer)  # an error here leaves the folder unchanged
    source = f"{args.train}, {args.val}" if args.train else HUB_NAME
    with exclusive_lock(args.out):
        files = {"val": args.val, "train": args.train}
        is_local = args.train is not None
        questions = {split: [*read_questions(files[split])] for split in files} if is_local else from_hub()
        splits: dict[str, list[Sequence]] = {}
        for split, listed in questions.items():
            complete = [question for question in listed if question.is_complete]
            sequences = [make_sequence(question, tokenizer, args.seq_len) for question in complete]
            splits[split] = [sequence for sequence in sequences if sequence is not None]
            n = len(splits[split])
            n_longer = len(complete) - n
            if not n:
                raise UserError(f"{source}: {split}: no question fits --seq-len {args.seq_len}")
            print(f"{split:6} {n:,} questions in {args.seq_len} tokens each, {n_longer:,} were longer")
        info = {"dataset": DATASET, "tokenizer": args.tokenizer, "vocab_size": tokenizer.n_vocab}
        # The zeros after an end-of-text are a document, too.
        write_masked(args.out, info | {"source": source}, splits, n_documents=2)


if __name__ == "__main__":
    run_main(main)
