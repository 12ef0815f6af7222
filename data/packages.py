"""Prepare the track's corpus: pure-Python packages of PyPI, pinned, with long held-out documents.

    python -m data.packages                    # 46 MB of wheels -> data/packages_4k
    python -m data.packages --wheels FOLDER    # wheels that another machine has downloaded

data/packages.csv lists each wheel with its licence and sha256, and the split that it belongs to:
train; val, on which rates and scalings are chosen; test, on which results are reported. Whole
packages are held out, and of those only files of at least 16,384 tokens are kept. A document is a
.py file. The tokeniser is a byte-level BPE of 4,096 tokens, trained on the training packages.

A document is dropped as a copy if too many of its runs of 32 tokens stand in an earlier document:
over half of a training document, over a tenth of a held-out one. What is still shared is printed
at the end; over 0.5 % is an error. Vendored packages are dropped, too, and tables of data, which
have under 2 characters a token. The same table gives the same tokens on any Python.

Writes packages_val_000000.bin, packages_test_000001.bin, packages_train_000002.bin (format:
data/shards.py), tokenizer.json, and at the end dataset.json.
"""

import csv
import hashlib
import io
import os
import re
import urllib.request
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urljoin

import numpy as np

from data import dataset
from data.documents import naming
from data.tokenizer import FileTokenizer, encode, train_bpe
from infra.cli import ArgumentParser, UserError, n_cores, run_main
from infra.files import exclusive_lock, write_atomically

DATA = Path(__file__).resolve().parent
DATASET = "packages"
VOCABULARY = 4096
LONG = 16_384  # tokens; held-out documents have at least these
RUN = 32  # tokens of a run that is looked for in other documents
MOST_COPIED = {"train": 0.5, "val": 0.1, "test": 0.1}  # share of a document's runs
LEAST_CHARACTERS = 2  # a token; below are tables of numbers, base64 and the like
MOST_SHARED = 0.005  # share of the held-out runs that may stand in the training text
PUBLISHED = {  # sha256 of each split's tokens, as results/ were measured on
    "train": "c4bca3eb8cf735af87795caddf102a067e14b8843c10c4fec0009b4956c2c718",
    "val": "41bb81c34cc1e07d7f7114925327a2aa3e2c5a7fcbafa04489479cd761b33889",
    "test": "efd157a3fce624a849bd353ac019496d5a919653a0c7715f8be876f19f010e6c",
}
VENDORED = re.compile(r"(^|/)(_?vendor(ed|_packages)?|_?extern(al|als)?|packages/six)(/|\.py$)")


class Package(NamedTuple):
    """A row of packages.csv."""

    split: str
    package: str
    version: str
    licence: str
    sha256: str

    @property
    def wheel(self) -> str:
        return f"{self.package}-{self.version}-py3-none-any.whl"


class Document(NamedTuple):
    split: str
    name: str  # package/path
    text: str


def read_table(path: Path) -> list[Package]:
    with open(path, encoding="utf-8", newline="") as file:
        return [Package(**row) for row in csv.DictReader(file)]


def open_wheel(package: Package, wheels: Path) -> zipfile.ZipFile:
    """The wheel, from the folder or else from the package index, which is asked once.

    Raises UserError: it cannot be fetched, or is another file than the table's.
    """
    path = wheels / package.wheel
    if path.exists():
        content = path.read_bytes()
    else:
        print(f"fetching {package.wheel}", flush=True)
        with naming(package.wheel, hint="; or put it into --wheels"):
            content = download(package)
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != package.sha256:
        raise UserError(f"{path}: sha256 {sha256[:12]}...: expected {package.sha256[:12]}...")
    if not path.exists():
        write_atomically(path, content)
    return zipfile.ZipFile(io.BytesIO(content))


def download(package: Package) -> bytes:
    """The wheel by the index's page of links (PEP 503)."""
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    page_url = f"{index}/{package.package.replace('_', '-')}/"
    with urllib.request.urlopen(page_url, timeout=60) as page:
        links = re.findall(r'href="([^"]+)"', page.read().decode())
    for link in links:
        if link.partition("#")[0].rpartition("/")[2] == package.wheel:
            with urllib.request.urlopen(urljoin(page_url, link), timeout=60) as wheel:
                return bytes(wheel.read())
    raise UserError(f"{page_url}: has no {package.wheel}")


def read_documents(table: list[Package], wheels: Path) -> Iterator[Document]:
    """All .py files of the wheels, but for vendored packages, what is no UTF-8, and held-out files
    that cannot be long enough.
    """
    for package in table:
        wheel = open_wheel(package, wheels)
        for name in sorted(wheel.namelist()):
            if not name.endswith(".py") or VENDORED.search(name):
                continue
            content = wheel.read(name)
            if package.split != "train" and len(content) < LONG:  # a token has at least one byte
                continue
            try:
                text = content.decode("utf-8")
            except UnicodeDecodeError:
                continue
            yield Document(package.split, f"{package.package}/{name}", text)


def run_hashes(tokens: np.ndarray) -> np.ndarray:
    """A hash of each run of RUN tokens: (n,) to (n - RUN + 1,) uint64; (0,) if n < RUN."""
    hashes = tokens.astype(np.uint64) + np.uint64(1)
    width = 1
    while width < RUN:  # of two neighbours of `width` tokens one of twice as many
        mixed = hashes * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
        hashes = mixed[:-width] + hashes[width:]
        width *= 2
    return hashes


def copied_shares(documents: list[np.ndarray]) -> np.ndarray:
    """The share of each document's runs that stand in an earlier one: (documents,) float64."""
    hashes = [run_hashes(tokens) for tokens in documents]
    owner = np.repeat(np.arange(len(documents)), [len(each) for each in hashes])
    _, first, which = np.unique(np.concatenate(hashes), return_index=True, return_inverse=True)
    is_copied = owner[first][which] < owner
    n_copied = np.bincount(owner, is_copied, minlength=len(documents))
    n_runs = np.bincount(owner, minlength=len(documents))
    return n_copied / np.maximum(n_runs, 1)


def shared_runs(train: list[np.ndarray], held_out: list[np.ndarray]) -> float:
    """The share of the held-out documents' runs that stand in a training document."""
    known = np.concatenate([run_hashes(tokens) for tokens in train])
    runs = np.concatenate([run_hashes(tokens) for tokens in held_out])
    return float(np.isin(runs, known).mean())


def choose(documents: list[Document], tokens: list[np.ndarray]) -> dict[str, list[np.ndarray]]:
    """The tokens of each split's documents, without copies and short held-out ones.

    Training documents come first, as what the others are copies of. The order is by a hash of the
    name, so neighbouring windows are not all of one package.
    """
    ranks = {"train": 0, "val": 1, "test": 2}

    def place(i: int) -> tuple[int, str]:
        return ranks[documents[i].split], hashlib.sha256(documents[i].name.encode()).hexdigest()

    order = sorted(range(len(documents)), key=place)
    chosen: dict[str, list[np.ndarray]] = {"val": [], "test": [], "train": []}
    for i, copied in zip(order, copied_shares([tokens[i] for i in order]), strict=True):
        split = documents[i].split
        n_tokens = len(tokens[i])
        is_long = n_tokens >= (RUN if split == "train" else LONG)
        is_text = len(documents[i].text) >= LEAST_CHARACTERS * n_tokens
        if is_long and is_text and copied <= MOST_COPIED[split]:
            chosen[split].append(tokens[i])
    return chosen


def build(table: list[Package], wheels: Path, out: Path) -> dict[str, Any]:
    """Make the dataset in `out`, or find it there; returns dataset.json's content.

    Raises UserError: a wheel that cannot be fetched or is another one, a folder with another
    dataset, or held-out text that stands in the training text.
    """
    settings = {"wheels": [f"{package.split} {package.sha256}" for package in table]}
    finished = dataset.made_before(out, DATASET, settings)
    if finished:
        return finished
    wheels.mkdir(parents=True, exist_ok=True)
    documents = list(read_documents(table, wheels))
    print(f"training a BPE of {VOCABULARY} tokens", flush=True)
    content = train_bpe((each.text for each in documents if each.split == "train"), VOCABULARY)
    tokenizer = FileTokenizer(content, DATASET)
    print(f"tokenising {len(documents):,} files", flush=True)
    with ThreadPoolExecutor(n_cores()) as pool:  # the library encodes without the GIL
        tokens = list(pool.map(lambda document: encode(tokenizer, document.text), documents))
    chosen = choose(documents, tokens)
    shared = {split: shared_runs(chosen["train"], chosen[split]) for split in ("val", "test")}
    for split, share in shared.items():
        print(f"{split}: {share:.3%} of runs of {RUN} tokens are in the training text")
        if share > MOST_SHARED:
            raise UserError(f"{split}: {share:.2%} of runs shared: expected {MOST_SHARED:.1%}")
    source = f"{len(table)} packages of PyPI (data/packages.csv)"
    info = {"dataset": DATASET, "source": source, "settings": settings, "shared": shared}
    return dataset.write_dataset(out, info, chosen, tokenizer)


def main() -> None:
    parser = ArgumentParser(__doc__)
    add = parser.add_argument
    default = DATA / "packages_4k"
    add("--out", type=Path, default=default, metavar="DIR", help="default: data/packages_4k")
    default = DATA / "wheels"
    add("--wheels", type=Path, default=default, metavar="DIR", help="default: data/wheels")
    args = parser.parse_args()
    with exclusive_lock(args.out):
        info = build(read_table(DATA / "packages.csv"), args.wheels, args.out)
    dataset.print_summary(info, args.out, "configs/track.toml")


if __name__ == "__main__":
    run_main(main)
