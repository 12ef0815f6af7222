"""Prepare SQuAD 2.0 for supervised fine-tuning (SSMax, Section 3.3 and Appendix C).

    python data/squad.py                                              # from the hub -> data/squad
    python data/squad.py --train train-v2.0.json --val dev-v2.0.json  # local files in SQuAD's schema
    python data/squad.py --train dev-v2.0.json --tokenizer bytes --out data/squad_bytes

Every question that has an answer becomes one sequence of --seq-len tokens, which train.seq_len must equal:

    <|endoftext|>{context}

    Question: {question}
    Answer: {answer}<|endoftext|>, and zeros to the end

Only the answer (the first that is given) and the end-of-text after it are learned: a second pair of splits,
trainmask and valmask, holds 1 for each token that counts and 0 for the others, token by token. train.py and
its validation leave the others out of the loss. Longer sequences are left out and counted. Without --val,
all questions of every tenth article are held out.

Writes squad_val_000000.bin, squad_train_000001.bin, the masks, and last of all dataset.json (format:
data/shards.py). Train on it with configs/ssmax_paper/sft.toml.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiktoken

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from data.hub import Download, HubDataset, remove_downloads  # noqa: E402
from data.prompts import question_prompt  # noqa: E402
from data.shards import ShardWriter, begin_dataset, finish_dataset, only_one, progress_bar  # noqa: E402
from data.tokenizer import TOKENIZERS, get_tokenizer  # noqa: E402
from infra.cli import ArgumentParser, UserError, run_main  # noqa: E402

DATASET = "squad"
HUB_NAME, HUB_FOLDER = "rajpurkar/squad_v2", "squad_v2"
HUB_SPLITS = {"train": "train", "val": "validation"}
SHARD_SIZE = 10**8
HELD_OUT = 10  # one article in so many, without --val


class Question(NamedTuple):
    article: str
    context: str
    question: str
    answer: str


def main() -> None:
    args = parse_args()
    tokenizer = get_tokenizer(args.tokenizer)
    out = Path(args.out)
    with only_one(out):
        begin_dataset(out)
        questions, source = from_files(args) if args.train else from_hub(out / "download")
        build(out, questions, source, args.tokenizer, tokenizer, args.seq_len)


# ---------------------------------------------------------------- reading


def from_files(args: argparse.Namespace) -> tuple[dict[str, list[Question]], str]:
    train = list(read_json(Path(args.train)))
    if args.val:
        return {"val": list(read_json(Path(args.val))), "train": train}, f"{args.train}, {args.val}"
    held_out = set(list(dict.fromkeys(q.article for q in train))[::HELD_OUT])
    splits = {
        "val": [q for q in train if q.article in held_out],
        "train": [q for q in train if q.article not in held_out],
    }
    return splits, args.train


def read_json(path: Path) -> Iterator[Question]:
    """The questions with an answer in a file of SQuAD's schema.

    Raises:
        UserError: the file cannot be read or is of another schema.
    """
    try:
        articles = json.loads(path.read_text(encoding="utf-8"))["data"]
        for i, article in enumerate(articles):
            for paragraph in article["paragraphs"]:
                for qa in paragraph["qas"]:
                    if qa["answers"]:
                        title = article.get("title", str(i))
                        yield Question(title, paragraph["context"], qa["question"], qa["answers"][0]["text"])
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(
            f"{path}: not of SQuAD's schema, {{data: [{{paragraphs: [{{context, qas: [{{question, answers: "
            f"[{{text}}]}}]}}]}}]}} ({type(e).__name__}: {e})"
        ) from None


def from_hub(folder: Path) -> tuple[dict[str, list[Question]], str]:
    """Both splits of the dataset on the hub, by way of a folder of downloads that is removed again."""
    import pyarrow.parquet

    dataset = HubDataset(HUB_NAME, wanted=f"{HUB_FOLDER}/*")
    files, splits = dataset.files(HUB_FOLDER), {}
    for split, name in reversed(HUB_SPLITS.items()):
        rows: list[dict[str, Any]] = []
        for file in files:
            if Path(file.name).name.startswith(f"{name}-"):
                path = Download(dataset, file, folder).result()
                rows += pyarrow.parquet.read_table(path).to_pylist()
        if not rows:
            raise UserError(f"{HUB_NAME}: no {HUB_FOLDER}/{name}-*.parquet at {dataset.commit}")
        splits[split] = [
            Question(row["title"], row["context"], row["question"], row["answers"]["text"][0])
            for row in rows
            if row["answers"]["text"]
        ]
    remove_downloads(folder)
    return splits, f"{HUB_NAME} at commit {dataset.commit}"


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
    tokens = np.zeros(seq_len, np.uint16)
    tokens[:stop] = [tokenizer.eot_token, *prompt, *answer, tokenizer.eot_token]
    mask = np.zeros(seq_len, np.uint16)
    mask[start:stop] = 1
    return tokens, mask


def build(
    out: Path,
    splits: dict[str, list[Question]],
    source: str,
    tokenizer_name: str,
    tokenizer: tiktoken.Encoding,
    seq_len: int,
) -> None:
    """Write the sequences of both splits, then the masks, and say what there is."""
    info: dict[str, Any] = {
        "dataset": DATASET, "tokenizer": tokenizer_name, "vocab_size": tokenizer.n_vocab, "source": source,
        "sequence_length": seq_len, "splits": {}, "shards": [],
    }  # fmt: skip
    masks: dict[str, list[np.ndarray]] = {}
    for split, questions in splits.items():
        with progress_bar(split, len(questions), "questions", leave=False) as bar:
            rows = []
            for question in questions:
                rows.append(make_sequence(question, tokenizer, seq_len))
                bar.update()
        kept = [row for row in rows if row is not None]
        if not kept:
            raise UserError(f"{source}: {split}: no question fits --seq-len {seq_len}")
        masks[f"{split}mask"] = [mask for _, mask in kept]
        # To data/check.py the zeros after an end-of-text are a document, too.
        write_split(out, info, split, [tokens for tokens, _ in kept], documents=2 * len(kept))
        n, longer = len(kept), len(rows) - len(kept)
        print(f"{split:6} {n:,} questions in sequences of {seq_len} tokens, {longer:,} were longer")
    for split, rows_of_mask in masks.items():
        write_split(out, info, split, rows_of_mask, documents=0)
    finish_dataset(out, info)
    print(f"written {out}")


def write_split(out: Path, info: dict[str, Any], split: str, rows: list[np.ndarray], documents: int) -> None:
    """Write a split's shards after those that `info` has, and enter them there."""
    with ShardWriter(out, DATASET, split, SHARD_SIZE, index=len(info["shards"])) as writer:
        for row in rows:
            writer.add(row)
    info["shards"] += writer.files
    info["splits"][split] = writer.counts(documents)


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--train", metavar="FILE", help="a local JSON (default: the dataset on the hub)")
    parser.add_argument(
        "--val", metavar="FILE", help="a local JSON (default: every tenth article of --train)"
    )
    parser.add_argument("--tokenizer", choices=TOKENIZERS, default="gpt2", help="(default: %(default)s)")
    parser.add_argument(
        "--seq-len", type=int, default=1024, metavar="T", help="of every sequence (default: %(default)s)"
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        default=str(ROOT / "data" / DATASET),
        help="folder to write (default: data/squad)",
    )
    args = parser.parse_args()
    if args.val and not args.train:
        raise UserError("--val: expected --train as well")
    if args.seq_len < 8:
        raise UserError(f"--seq-len {args.seq_len}: expected at least 8")
    return args


if __name__ == "__main__":
    run_main(main)
