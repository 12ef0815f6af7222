"""Train a byte-level BPE, GPT-2's kind of tokeniser, on a corpus.

    python -m lab.bpe --vocab 4096 --out tokenizer.json                      # on Python's library sources
    python -m lab.bpe --files 'dir/*.txt' --vocab 8192 --out tokenizer.json  # or any files of data.prepare
    python -m data.python_source --tokenizer tokenizer.json --out data/python_4k

Without --files the text is the training split of data.python_source. With --files it is all of
them, what becomes validation included. `<|endoftext|>` is token 0. The same text gives the same
file.
"""

import sysconfig
from pathlib import Path

from data.documents import Cursor, local_files, read_blocks
from data.python_source import VAL_SHARE, collect, split_documents
from data.tokenizer import get_tokenizer, train_bpe
from infra.cli import ArgumentParser, integer, run_main
from infra.files import write_atomically


def main() -> None:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    add(
        "--files",
        nargs="+",
        metavar="PATTERN",
        help="of data.prepare (default: Python's library sources)",
    )
    add("--column", default="text", help="the column, or JSON key, with the text (default: text)")
    add(
        "--vocab", type=integer(257, 65536), required=True, metavar="N", help="tokens, 257 to 65536"
    )
    add("--out", type=Path, required=True, metavar="FILE", help="the tokenizer.json to write")
    args = parser.parse_args()
    if not args.out.parent.is_dir():
        parser.error(f"--out {args.out}: expected a folder that exists")
    if args.files:
        blocks = read_blocks(local_files(args.files, args.column).open(), Cursor())
        texts = (text for block in blocks for text in block.texts)
    else:
        sources = collect(Path(sysconfig.get_path("stdlib")))
        texts = (document.text for document in split_documents(sources, VAL_SHARE)["train"])
    content = train_bpe(texts, args.vocab)
    if args.out.exists() and args.out.read_bytes() != content.encode():
        parser.error(f"--out {args.out}: another file has this name: expected a new one")
    write_atomically(args.out, content.encode())
    n_vocab = get_tokenizer("", content).n_vocab
    fewer = (
        f", fewer than {args.vocab:,}: the text has no more merges" if n_vocab < args.vocab else ""
    )
    print(f"{args.out}: {n_vocab:,} tokens{fewer}")


if __name__ == "__main__":
    run_main(main)
