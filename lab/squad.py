"""Prepare SQuAD 2.0 for supervised fine-tuning (SSMax, Section 3.3 and Appendix C).

    python -m lab.squad                                              # from the hub -> data/squad
    python -m lab.squad --train train-v2.0.json --val dev-v2.0.json  # local files in SQuAD's schema
    python -m lab.squad --train dev-v2.0.json --tokenizer bytes --out data/squad_bytes

Every question whose context, question and answer are not empty (86,820 in the paper) becomes one sequence of
--seq-len tokens, which train.seq_len must equal:

    <|endoftext|>{context}

    Question: {question}
    Answer: {answer}<|endoftext|>, and zeros to the end

Only the first answer and the end-of-text after it are learned: a second pair of splits, trainmask and
valmask, holds 1 for each token that counts and 0 for the others, token by token. Training and validation
leave the others out of the loss. Longer sequences are left out and counted. Without --val, all questions of
every tenth article are held out.

Writes squad_val_000000.bin, squad_train_000001.bin, the masks, and at the end dataset.json (format:
data/shards.py). Train on it with configs/ssmax_paper/sft.toml.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiktoken

from data.dataset import begin_dataset, finish_dataset, write_split
from data.documents import naming
from data.tokenizer import TOKENIZERS, get_tokenizer
from infra.cli import ArgumentParser, UserError, run_main
from infra.files import exclusive_lock

DATASET = "squad"
HUB_NAME = "rajpurkar/squad_v2"
HUB_SPLITS = {"val": "validation", "train": "train"}
HELD_OUT = 10  # without --val: one of this many articles


class Question(NamedTuple):
    article: str
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


def from_files(train: Path, val: Path | None) -> tuple[dict[str, list[Question]], str]:
    """Both splits, and a description of the source."""
    questions = list(read_questions(train))
    if val:
        return {"val": list(read_questions(val)), "train": questions}, f"{train}, {val}"
    held_out = set(list(dict.fromkeys(q.article for q in questions))[::HELD_OUT])
    splits: dict[str, list[Question]] = {"val": [], "train": []}
    for question in questions:
        splits["val" if question.article in held_out else "train"].append(question)
    return splits, str(train)


def read_questions(path: Path) -> Iterator[Question]:
    """The questions with an answer in a file of SQuAD's schema.

    Raises:
        UserError: the file cannot be read or has another schema.
    """
    try:
        articles = json.loads(path.read_text(encoding="utf-8"))["data"]
        for i, article in enumerate(articles):
            for paragraph in article["paragraphs"]:
                for qa in paragraph["qas"]:
                    if qa["answers"]:
                        title, answer = article.get("title", str(i)), qa["answers"][0]["text"]
                        question = Question(title, paragraph["context"], qa["question"], answer)
                        if not all(isinstance(text, str) for text in question):
                            raise TypeError(f"expected texts, found {question}")
                        yield question
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise UserError(
            f"{path}: not of SQuAD's schema, {{data: [{{paragraphs: [{{context, qas: [{{question, answers: "
            f"[{{text}}]}}]}}]}}]}} ({type(e).__name__}: {e})"
        ) from None


def from_hub() -> tuple[dict[str, list[Question]], str]:
    """As `from_files`, by `datasets`; offline from its cache."""
    import datasets

    hint = "; without a network give SQuAD's own files: --train train-v2.0.json --val dev-v2.0.json"
    with naming(f"{HUB_NAME} on the hub", hint):
        found = datasets.load_dataset(HUB_NAME)
        splits = {
            split: [
                Question(row["title"], row["context"], row["question"], row["answers"]["text"][0])
                for row in found[name]
                if row["answers"]["text"]
            ]
            for split, name in HUB_SPLITS.items()
        }
    return splits, HUB_NAME


# ---------------------------------------------------------------- writing


def make_sequence(
    question: Question, tokenizer: tiktoken.Encoding, seq_len: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """Tokens and mask, (seq_len,) uint16 each; None if they do not fit."""
    prompt = tokenizer.encode_ordinary(question_prompt(question.context, question.question))
    answer = tokenizer.encode_ordinary(f" {question.answer}")
    start = 1 + len(prompt)
    stop = start + len(answer) + 1
    if stop > seq_len:
        return None
    tokens, mask = np.zeros(seq_len, np.uint16), np.zeros(seq_len, np.uint16)
    tokens[:stop] = [tokenizer.eot_token, *prompt, *answer, tokenizer.eot_token]
    mask[start:stop] = 1
    return tokens, mask


def build(
    out: Path, splits: dict[str, list[Question]], source: str, tokenizer_name: str, seq_len: int
) -> None:
    """Write the sequences of both splits, then the masks, and print the counts."""
    tokenizer = get_tokenizer(tokenizer_name)
    info: dict[str, Any] = {
        "dataset": DATASET, "tokenizer": tokenizer_name, "vocab_size": tokenizer.n_vocab, "source": source,
        "sequence_length": seq_len, "splits": {}, "shards": [],
    }  # fmt: skip
    kept: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for split, questions in splits.items():
        rows = [make_sequence(question, tokenizer, seq_len) for question in questions if question.is_complete]
        kept[split] = [row for row in rows if row is not None]
        if not kept[split]:
            raise UserError(f"{source}: {split}: no question fits --seq-len {seq_len}")
        n, longer = len(kept[split]), len(rows) - len(kept[split])
        print(f"{split:6} {n:,} questions in sequences of {seq_len} tokens, {longer:,} were longer")
    begin_dataset(out, DATASET)
    for split, sequences in kept.items():
        # For data/verify.py the zeros after an end-of-text are a document, too.
        write_split(out, info, split, [tokens for tokens, _ in sequences], 2 * len(sequences))
    for split, sequences in kept.items():
        write_split(out, info, f"{split}mask", [mask for _, mask in sequences], 0)
    finish_dataset(out, info)
    print(f"written {out}")


def _parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add("--train", type=Path, metavar="FILE", help="a local JSON (default: the dataset on the hub)")
    add("--val", type=Path, metavar="FILE", help="a local JSON (default: every tenth article of --train)")
    add("--tokenizer", choices=TOKENIZERS, default="gpt2", help="(default: %(default)s)")
    add("--seq-len", type=int, default=1024, metavar="T", help="of every sequence (default: %(default)s)")
    default = Path(__file__).parent / DATASET
    add("--out", type=Path, metavar="DIR", default=default, help="folder to write (default: data/squad)")
    args = parser.parse_args()
    if args.val and not args.train:
        raise UserError("--val: expected --train as well")
    if args.seq_len < 8:
        raise UserError(f"--seq-len {args.seq_len}: expected at least 8")
    return args


def main() -> None:
    args = _parse_args()
    get_tokenizer(args.tokenizer)  # an error here leaves the folder unchanged
    with exclusive_lock(args.out):
        splits, source = from_files(args.train, args.val) if args.train else from_hub()
        build(args.out, splits, source, args.tokenizer, args.seq_len)


if __name__ == "__main__":
    run_main(main)
