"""data/fineweb.py with a hub: what is fetched, and what happens when the network, the disk or we fail.

Each test runs the script against `fake_hub`. What the shards must hold is computed here from the texts.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from fake_hub import COMMIT, FakeHub, Fault  # noqa: E402

from data import hub as hub_module  # noqa: E402
from data.check import verify  # noqa: E402
from data.hub import HubFile, damage, with_retries  # noqa: E402
from data.shards import TokenStream, open_shard, write_shard  # noqa: E402
from infra.cli import UserError  # noqa: E402

FINEWEB, EDU, GPT2 = "HuggingFaceFW/fineweb", "HuggingFaceFW/fineweb-edu", "kjj0/fineweb10B-gpt2"
FILES = [f"sample/10BT/000_{i:05}.parquet" for i in range(3)]
TOKENS_IN = (24_000, 12_000, 24_000)  # of the bytes tokeniser in each file of FINEWEB
SHARDS = ["fineweb_val_000000.bin", *(f"fineweb_train_{i:06}.bin" for i in (1, 2, 3))]
MOVED = "fedcba9876543210fedcba9876543210fedcba98"
EOT = 50256
HINTS = ("HF_HUB_OFFLINE", "--files", "--pretokenized")
# As data/fineweb.py, but it waits less and PATCH comes first. Its workers import it, too.
WRAPPER = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from data import documents, fineweb, hub, pretokenized
from infra.cli import run_main
if __name__ == "__main__":
    real_sleep = time.sleep
    time.sleep = lambda seconds: real_sleep(seconds / 50)
    exec(os.environ["PATCH"])
    run_main(fineweb.main)
"""
# Small blocks, each written before the next is read.
STEP_BY_STEP = "documents.BLOCK_BYTES = 2000; fineweb.BLOCKS_AHEAD = 0"
SMALL_CHUNKS = "import huggingface_hub.constants as c; c.DOWNLOAD_CHUNK_SIZE = 1000"


# ---------------------------------------------------------------- what is on the hub


def texts_of(file: int, seed: int = 0) -> list[str]:
    """Documents of about 300 bytes; with `<|endoftext|>` they are TOKENS_IN[file] tokens."""
    rng, texts, left = np.random.default_rng((seed, file)), [], TOKENS_IN[file]
    while left:
        length = min(left, int(rng.integers(100, 500)))
        texts.append("x" + "".join(map(chr, rng.integers(97, 123, length - 2))) if length > 1 else "")
        left -= length
    return texts


def write_parquet(folder: Path, seed: int = 0) -> None:
    for i, name in enumerate(FILES):
        path, texts = folder / name, texts_of(i, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        table = pa.table({"text": texts, "id": [str(j) for j in range(len(texts))]})
        pq.write_table(table, path, row_group_size=30)


def write_gpt2_shards(folder: Path, seed: int = 0) -> None:
    folder.mkdir()
    for i, name in enumerate(SHARDS):
        tokens = np.random.default_rng((seed, i)).integers(0, EOT, 3000 + i)
        tokens[:: 100 + i] = EOT
        write_shard(folder / name, tokens)


@pytest.fixture(scope="module")
def repos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("repos")
    write_parquet(folder / "fineweb")
    (folder / "fineweb" / "README.md").write_text("# FineWeb\n")
    (folder / "fineweb" / "sample" / "10BT" / "notes.md").write_text("no data\n")
    write_parquet(folder / "edu", seed=1)
    write_gpt2_shards(folder / "gpt2")
    (folder / "gpt2" / ".gitattributes").write_text("*.bin filter=lfs\n")
    return {FINEWEB: folder / "fineweb", EDU: folder / "edu", GPT2: folder / "gpt2"}


@pytest.fixture
def hub(repos: dict[str, Path]) -> Iterator[FakeHub]:
    with FakeHub(repos) as hub:
        yield hub


def expected_shards(shard_size: int, seed: int = 0, dataset: str = "fineweb") -> dict[str, bytes]:
    """The shards of all files in bytes' tokens, made without any code of data/fineweb.py."""
    documents = [text for i in range(3) for text in texts_of(i, seed) if text]
    stream = np.concatenate([[256, *text.encode()] for text in documents])
    shards = {}
    for i, start in enumerate(range(0, len(stream), shard_size)):
        tokens = stream[start : start + shard_size].astype("<u2")
        header = np.array([20240520, 1, len(tokens)] + [0] * 253, dtype="<i4")
        name = f"{dataset}_{'train' if i else 'val'}_{i:06}.bin"
        shards[name] = header.tobytes() + tokens.tobytes()
    return shards


def shards_in(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.glob("*.bin")}


# ---------------------------------------------------------------- running it


def once(fault: Fault, part: str, method: str = "GET") -> Callable[[str, str], Fault | None]:
    """The fault at the first request of each path that has the part."""
    seen: Counter[str] = Counter()

    def fail(called: str, path: str) -> Fault | None:
        if called != method or part not in path:
            return None
        seen[path] += 1
        return fault if seen[path] == 1 else None

    return fail


def always(fault: Fault, part: str) -> Callable[[str, str], Fault | None]:
    return lambda method, path: fault if part in path else None


def fetched(hub: FakeHub) -> list[str]:
    """The files that were asked for, by their names: once for each GET."""
    return [
        path.split("/resolve/")[1].split("/", 1)[1]
        for method, path, _ in list(hub.requests)
        if method == "GET" and "/resolve/" in path
    ]


class Place:
    """A folder for a test: `out` and the environment in which the script runs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out, self.home = folder, folder / "out", folder / "home"
        self.wrapper = folder / "wrapper.py"
        self.wrapper.write_text(WRAPPER)

    def command(self, *args: str, patch: str | None = None) -> list[str]:
        script = ROOT / "data" / "fineweb.py" if patch is None else self.wrapper
        if "--pretokenized" not in args:
            args = ("--tokenizer", "bytes", "--workers", "1", *args)
        return [sys.executable, str(script), "--out", str(self.out), *args]

    def env(self, url: str, patch: str | None = None, **more: str) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if not re.search("^HF_|^HUGGING|_proxy$", k, re.I)}
        own = {"HF_ENDPOINT": url, "HF_HOME": str(self.home), "HF_HUB_DISABLE_TELEMETRY": "1"}
        return env | own | {"PATCH": patch or ""} | more

    def run(
        self, hub: FakeHub | str, *args: str, patch: str | None = None, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run it to its end. Its streams are not translated: a \\r stays one."""
        url = hub if isinstance(hub, str) else hub.url
        done = subprocess.run(
            self.command(*args, patch=patch), env=self.env(url, patch, **env), capture_output=True, timeout=60
        )
        return subprocess.CompletedProcess(args, done.returncode, done.stdout.decode(), done.stderr.decode())

    def start(self, hub: FakeHub, *args: str, patch: str | None = None) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.command(*args, patch=patch),
            env=self.env(hub.url, patch),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    def kill(self, process: subprocess.Popen[bytes], when: Callable[[], object]) -> None:
        """SIGKILL, once `when()`."""
        wait_for(lambda: when() or process.poll() is not None)
        assert process.poll() is None
        process.kill()
        process.communicate(timeout=20)  # ends when the workers are gone, too

    def incomplete(self) -> set[str]:
        return {path.name for path in self.out.rglob("*.incomplete")}

    def downloads(self) -> list[str]:
        """Names of the whole files among the downloads."""
        folder = self.out / "download"
        files = sorted(path for path in folder.rglob("*") if path.suffix in (".parquet", ".bin"))
        return [path.relative_to(folder).as_posix() for path in files]

    def manifest(self) -> list[dict[str, Any]]:
        path = self.out / "manifest.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def info(self) -> dict[str, Any]:
        return json.loads((self.out / "dataset.json").read_text())


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def wait_for(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.01)


def lines_of(stderr: str) -> list[str]:
    """What is on stderr; a bar that was not ended is one of them (see `test_the_bar_is_ended`)."""
    lines = re.split(r"[\r\n]|(?<=\])(?=error: |stopped; )", stderr)
    return [line.strip() for line in lines if line.strip()]


def is_bar(line: str) -> bool:
    return bool(re.match(r"out: +\d+%\||checking what is there: +\d+%\|", line))


def assert_good(done: subprocess.CompletedProcess[str], commit: str = COMMIT) -> None:
    """Exit status 0, on stderr just the bar, on stdout just the summary."""
    assert done.returncode == 0, done.stderr
    assert [line for line in lines_of(done.stderr) if not is_bar(line)] == []
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["source", "val", "train", "folder"]
    assert done.stdout.splitlines()[0].endswith(f"at commit {commit}")


def assert_refused(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    """Exit status 2, nothing on stdout, on stderr one line with the parts, besides a bar."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = [line for line in lines_of(done.stderr) if not is_bar(line)]
    assert line.startswith("error: ")
    for part in parts:
        assert part in line


def assert_complete(place: Place, shard_size: int, **expected: Any) -> None:
    """All shards of the files are there, byte for byte, dataset.json counts them, and nothing else is."""
    shards = expected_shards(shard_size, **expected)
    assert shards_in(place.out) == shards
    assert sorted(os.listdir(place.out)) == sorted([*shards, "manifest.jsonl", "dataset.json"])
    assert verify(place.out) == []


# ---------------------------------------------------------------- a run without faults


def test_hub_and_files_make_the_same_shards(hub: FakeHub, place: Place, repos: dict[str, Path]) -> None:
    hub.page_size = 2  # of a listing
    from_hub = place.run(hub, "--shard-size", "7000")
    assert_good(from_hub)
    assert_complete(place, 7000)
    assert sorted(fetched(hub)) == FILES
    info, manifest = place.info(), place.manifest()

    other = Place(place.folder)
    other.out = place.folder / "files" / "out"
    from_files = other.run(hub, "--shard-size", "7000", "--files", f"{repos[FINEWEB]}/sample/10BT/*.parquet")
    assert shards_in(other.out) == shards_in(place.out)
    assert other.info() | {"source": ""} == info | {"source": ""}
    assert other.manifest()[1:] == manifest[1:]
    assert from_files.stdout.splitlines()[1:-1] == from_hub.stdout.splitlines()[1:-1]
    assert info["source"] == f"{FINEWEB} sample/10BT at commit {COMMIT}"
    assert info["splits"]["train"]["tokens"] == sum(TOKENS_IN) - 7000
    assert manifest[0]["inputs"] == [
        {"name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name in FILES
        for content in [(repos[FINEWEB] / name).read_bytes()]
    ]


def test_edu_at_a_commit_and_once_more(hub: FakeHub, place: Place) -> None:
    (place.folder / "empty").mkdir()
    hub.move_main(MOVED, {EDU: place.folder / "empty"})
    args = ("--edu", "--shard-size", "7000", "--revision", COMMIT)
    assert_good(place.run(hub, *args))
    assert_complete(place, 7000, seed=1, dataset="fineweb_edu")
    hub.requests.clear()
    again = place.run(hub, *args)
    assert (again.returncode, again.stderr, fetched(hub)) == (0, "", [])
    assert "finished before; nothing to do" in again.stdout.splitlines()[0]


def test_one_file_is_fetched_ahead(hub: FakeHub, place: Place) -> None:
    """The first answer is held back until the next file is asked for: without that, there is no end."""
    asked, ahead = threading.Event(), []

    def fail(method: str, path: str) -> None:
        if method == "GET" and FILES[1] in path:
            asked.set()
        elif method == "GET" and FILES[0] in path:
            asked.wait(20)
            time.sleep(0.3)
            ahead.extend(fetched(hub))

    hub.fail = fail
    assert_good(place.run(hub, "--shard-size", "7000"))
    assert sorted(ahead) == FILES[:2]
    assert_complete(place, 7000)


def test_max_tokens_does_not_wait_for_the_next_file(hub: FakeHub, place: Place) -> None:
    hub.fail = once(Fault(stall=60), FILES[1])
    assert_good(place.run(hub, "--shard-size", "7000", "--max-tokens", "15000", patch=STEP_BY_STEP))
    assert {name: len(content) for name, content in shards_in(place.out).items()} == {
        SHARDS[0]: 1024 + 14_000,
        SHARDS[1]: 1024 + 14_000,
        SHARDS[2]: 1024 + 2_000,
    }
    assert not (place.out / "download").exists()
    assert verify(place.out) == []


def test_a_log_file_is_not_filled_while_it_waits(hub: FakeHub, place: Place) -> None:
    hub.fail = once(Fault(stall=2), FILES[0])
    done = place.run(hub, "--shard-size", "7000")
    assert_good(done)
    assert len(lines_of(done.stderr)) <= 4


# ---------------------------------------------------------------- stopped and run again


def resume(hub: FakeHub, place: Place, shard_size: int, stale: set[str]) -> list[str]:
    """Run it again, after "main" has moved to other files; returns what was fetched."""
    other = place.folder / "moved"
    write_parquet(other, seed=2)
    hub.move_main(MOVED, {FINEWEB: other})
    left_over: set[str] = set()

    def fail(method: str, path: str) -> None:
        assert MOVED not in path
        if method == "GET" and "/resolve/" in path:
            left_over.update(stale & place.incomplete())

    hub.fail = fail
    hub.requests.clear()
    assert stale
    assert_good(place.run(hub, "--shard-size", str(shard_size)))
    assert left_over == set()
    assert not any(MOVED in path for _, path, _ in hub.requests)
    assert_complete(place, shard_size)
    return sorted(fetched(hub))


def test_killed_in_the_first_download(hub: FakeHub, place: Place) -> None:
    """Nothing is written yet but the commit, which stays."""
    hub.fail = once(Fault(stall=60), FILES[0])
    process = place.start(hub, "--shard-size", "7000")
    place.kill(process, lambda: place.incomplete() and place.downloads() == FILES[1:2])
    assert len(place.manifest()) == 1 and not (place.out / "dataset.json").exists()
    assert resume(hub, place, 7000, place.incomplete()) == [FILES[0], FILES[2]]


def test_killed_while_all_files_are_needed(hub: FakeHub, place: Place) -> None:
    """The first training shard begins in the first file and ends in the third: both before are kept."""
    hub.fail = once(Fault(stall=60), FILES[2])
    process = place.start(hub, "--shard-size", "20000", patch=STEP_BY_STEP)
    shard = place.out / f".{SHARDS[1]}.tmp"
    past_first = 1024 + 2 * (TOKENS_IN[0] - 20_000 + 6_000)
    place.kill(process, lambda: place.incomplete() and shard.exists() and shard.stat().st_size > past_first)
    assert place.manifest()[-1]["next"][0] == 0
    assert place.downloads() == FILES[:2]
    assert resume(hub, place, 20_000, place.incomplete()) == [FILES[2]]


def test_killed_after_a_file_is_done_with(hub: FakeHub, place: Place) -> None:
    """A shard ends in the second file: the first is deleted, the second kept."""
    hub.fail = once(Fault(stall=60), FILES[2])
    process = place.start(hub, "--shard-size", "10000", patch=STEP_BY_STEP)
    place.kill(
        process,
        lambda: len(place.manifest()) == 4 and place.incomplete() and place.downloads() == FILES[1:2],
    )
    assert place.manifest()[-1]["next"][0] == 1
    assert resume(hub, place, 10_000, place.incomplete()) == [FILES[2]]


def test_damaged_downloads_are_fetched_again(hub: FakeHub, place: Place, repos: dict[str, Path]) -> None:
    downloads = place.out / "download" / "sample" / "10BT"
    downloads.mkdir(parents=True)
    contents = [(repos[FINEWEB] / name).read_bytes() for name in FILES]
    flipped = contents[0][:-1] + bytes([contents[0][-1] ^ 1])
    for name, content in zip(FILES, (flipped, contents[1][:-1], contents[2]), strict=True):
        (downloads / Path(name).name).write_bytes(content)
    assert_good(place.run(hub, "--shard-size", "7000"))
    assert sorted(fetched(hub)) == FILES[:2]
    assert_complete(place, 7000)


@pytest.mark.parametrize(
    ("signum", "status", "args"),
    [(signal.SIGINT, 130, ()), (signal.SIGTERM, 143, ("--pretokenized",))],
    ids=["ctrl-c", "sigterm-pretokenized"],
)
def test_stopped_in_mid_download(
    hub: FakeHub, place: Place, signum: int, status: int, args: tuple[str, ...]
) -> None:
    hub.fail = once(Fault(stall=60), "000001")
    process = place.start(hub, *(args or ("--shard-size", "7000")))
    wait_for(place.incomplete)
    process.send_signal(signum)
    stderr = process.communicate(timeout=20)[1].decode()
    assert process.returncode == status
    (line,) = [line for line in lines_of(stderr) if not is_bar(line)]
    assert line == "stopped; what is finished stays: run the same command again to go on"


def test_a_second_process_leaves_the_first_one_alone(hub: FakeHub, place: Place) -> None:
    release = threading.Event()

    def fail(method: str, path: str) -> None:
        if method == "GET" and "/resolve/" in path:
            release.wait(30)

    hub.fail = fail
    process = place.start(hub, "--shard-size", "7000")
    wait_for(lambda: len(place.incomplete()) == 2)
    before = place.incomplete()
    assert_refused(place.run(hub, "--shard-size", "7000"), "another process is preparing it")
    after = place.incomplete()
    release.set()
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert_complete(place, 7000)
    assert after == before


# ---------------------------------------------------------------- faults of the network

FAULTS = {
    "500": Fault(status=500),
    "503": Fault(status=503),
    "429": Fault(status=429, retry_after=1),
    "dropped": Fault(drop_after=5000),
    "dropped at once": Fault(drop_after=0),
    "reset": Fault(drop_after=5000, reset=True),
    "corrupt": Fault(corrupt=True),
    "stalled": Fault(stall=3),
}


@pytest.mark.parametrize("name", FAULTS)
def test_one_fault_of_each_file_is_got_over(hub: FakeHub, place: Place, name: str) -> None:
    hub.fail = once(FAULTS[name], "/resolve/")
    done = place.run(hub, "--shard-size", "7000", patch=SMALL_CHUNKS, HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert_good(done)
    assert_complete(place, 7000)
    assert Counter(fetched(hub)) == dict.fromkeys(FILES, 2)
    ranges = [header for method, _, header in hub.requests if header and method == "GET"]
    if name == "dropped":
        assert ranges == ["bytes=5000-"] * 3  # it goes on where it was cut off


def test_faults_before_the_first_file(hub: FakeHub, place: Place) -> None:
    """Of what is asked before there is a bar, a line on stderr tells; of HEAD requests nothing does."""
    info, tree = once(Fault(status=503), "/revision/"), once(Fault(drop_after=3), "/tree/")
    head = once(Fault(status=503), "/resolve/", "HEAD")
    hub.fail = lambda method, path: info(method, path) or tree(method, path) or head(method, path)
    done = place.run(hub, "--shard-size", "7000", patch="")
    lines = [line for line in lines_of(done.stderr) if not is_bar(line)]
    assert re.match(rf"{FINEWEB}: try 2 of 8 in 1 s: .*503", lines[0])
    assert all(re.match(rf"{FINEWEB}: listing sample/10BT: try 2 of 8 in 1 s: ", line) for line in lines[1:])
    assert len(lines) <= 2  # huggingface_hub lists again by itself, in some versions
    assert done.returncode == 0
    assert_complete(place, 7000)


PERMANENT = {
    "503": Fault(status=503),
    "dropped": Fault(drop_after=0),
    "corrupt": Fault(corrupt=True),
}


@pytest.mark.parametrize("name", PERMANENT)
def test_a_lasting_fault_ends_it_in_one_line(hub: FakeHub, place: Place, name: str) -> None:
    hub.fail = always(PERMANENT[name], FILES[1])
    done = place.run(hub, "--shard-size", "7000", patch=f"hub.TRIES = 3; {STEP_BY_STEP}")
    told = f"{FINEWEB}: fetching {FILES[1]}: gave up after 3 tries ("
    assert_refused(done, told, "run the same command again to go on", *HINTS)
    assert not (place.out / "dataset.json").exists()
    if name != "503":
        return
    assert len(place.manifest()) == 4  # what the first file had is written
    hub.fail = lambda method, path: None
    hub.requests.clear()
    assert_good(place.run(hub, "--shard-size", "7000"))
    assert_complete(place, 7000)


def test_the_bar_is_ended(hub: FakeHub, place: Place) -> None:
    """The last line is the error's alone."""
    hub.fail = always(Fault(status=503), FILES[0])
    done = place.run(hub, "--shard-size", "7000", patch="hub.TRIES = 2; time.sleep = real_sleep")
    assert_refused(done, "gave up after 2 tries")
    assert re.search("(^|[\r\n])error: [^\r\n]*\n$", done.stderr)


def test_a_file_that_is_listed_but_not_there(hub: FakeHub, place: Place) -> None:
    def fail(method: str, path: str) -> None:
        if "/resolve/" in path:
            hub.commits[COMMIT][FINEWEB].pop(FILES[0], None)

    hub.fail = fail
    assert_refused(place.run(hub, "--shard-size", "7000"), FINEWEB, FILES[0])


def test_a_file_that_is_refused(hub: FakeHub, place: Place) -> None:
    hub.fail = always(Fault(status=403), FILES[0])
    done = place.run(hub, "--shard-size", "7000", patch="hub.TRIES = 3")
    assert_refused(done, f"fetching {FILES[0]}: refused", "hf auth login")


# ---------------------------------------------------------------- without a network


@pytest.fixture
def nobody() -> str:
    """An address where nothing listens."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{s.getsockname()[1]}"


@pytest.mark.parametrize("args", [(), ("--pretokenized",)], ids=["fineweb", "pretokenized"])
def test_no_network(nobody: str, place: Place, args: tuple[str, ...]) -> None:
    begun = time.monotonic()
    assert_refused(place.run(nobody, *args), "cannot be reached", *HINTS)
    assert time.monotonic() - begun < 10
    assert not place.out.exists()
    assert_refused(place.run(nobody, *args, HF_HUB_OFFLINE="1"), "not whole in the hub's cache", *HINTS)


def fill_cache(hub: FakeHub, place: Place, call: str) -> dict[Path, bytes]:
    code = f"from huggingface_hub import *; {call}"
    env = place.env(hub.url)
    subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, timeout=60)
    hub.requests.clear()
    return cache_of(place)


def cache_of(place: Place) -> dict[Path, bytes]:
    """All files of the datasets in the hub's cache."""
    paths = (place.home / "hub").glob("datasets--*/*/**/*")
    return {path: path.read_bytes() for path in paths if path.is_file() and ".locks" not in path.parts}


WAYS_TO_FILL = {
    "all": f"snapshot_download({FINEWEB!r}, repo_type='dataset')",
    "each": f"[hf_hub_download({FINEWEB!r}, f, repo_type='dataset') for f in {FILES!r}]",
    "sample": f"snapshot_download({FINEWEB!r}, repo_type='dataset', allow_patterns='sample/10BT/*')",
}


@pytest.mark.parametrize(
    "way",
    [
        "all",
        "each",
        "sample",
    ],
)
def test_offline_from_the_cache(hub: FakeHub, nobody: str, place: Place, way: str) -> None:
    cached = fill_cache(hub, place, WAYS_TO_FILL[way])
    assert len([path for path in cached if path.suffix == ".parquet"]) == 3
    assert_good(place.run(nobody, "--shard-size", "7000", HF_HUB_OFFLINE="1"))
    assert_complete(place, 7000)
    assert cache_of(place) == cached
    if way == "all":
        done = place.run(nobody, "--sample", "100BT", HF_HUB_OFFLINE="1")
        assert_refused(done, "sample/100BT")
        done = place.run(nobody, "--revision", "v1", HF_HUB_OFFLINE="1")
        assert_refused(done, "v1 is not whole in the hub's cache", *HINTS)


def test_offline_with_a_part_in_the_cache(hub: FakeHub, nobody: str, place: Place) -> None:
    """A snapshot that was begun: the cache's own listing of the commit tells what is missing."""
    (path,) = [
        path for path in fill_cache(hub, place, WAYS_TO_FILL["all"]) if path.name == Path(FILES[1]).name
    ]
    path.unlink()
    assert_refused(place.run(nobody, "--shard-size", "7000", HF_HUB_OFFLINE="1"), *HINTS)


def test_online_the_cache_is_used_but_not_believed(hub: FakeHub, place: Place) -> None:
    call = f"[hf_hub_download({FINEWEB!r}, f, repo_type='dataset') for f in {FILES[:2]!r}]"
    cached = fill_cache(hub, place, call)
    (damaged,) = [path.resolve() for path in cached if path.name == Path(FILES[1]).name]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    cached = cache_of(place)
    assert_good(place.run(hub, "--shard-size", "7000"))
    assert_complete(place, 7000)
    assert sorted(fetched(hub)) == FILES[1:]
    assert cache_of(place) == cached


def test_pretokenized_offline_from_the_cache(
    hub: FakeHub, nobody: str, place: Place, repos: dict[str, Path]
) -> None:
    cached = fill_cache(hub, place, f"snapshot_download({GPT2!r}, repo_type='dataset')")
    assert_good(place.run(nobody, "--pretokenized", "--shards", "2", HF_HUB_OFFLINE="1"))
    assert_pretokenized(place, repos, 2)
    assert cache_of(place) == cached


# ---------------------------------------------------------------- wrong arguments


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (("--revision", "v9"), ["--revision v9", f"{FINEWEB} has no such branch, tag or commit"]),
        (("--sample", "100BT"), [f"{FINEWEB}: no folder sample/100BT"]),
        (("--sample", "350BT"), [f"{FINEWEB}: no parquet files in sample/350BT"]),
        (("--edu",), [f"{EDU}: no such dataset on http://127.0.0.1"]),
    ],
    ids=["revision", "folder", "no parquet", "dataset"],
)
def test_what_the_hub_does_not_have(hub: FakeHub, place: Place, args: tuple[str, ...], parts: list) -> None:
    del hub.commits[COMMIT][EDU]
    hub.commits[COMMIT][FINEWEB]["sample/350BT/README.md"] = b"nothing yet"
    assert_refused(place.run(hub, *args), *parts)
    assert not place.out.exists()


@pytest.mark.parametrize("args", [(), ("--pretokenized",)], ids=["fineweb", "pretokenized"])
def test_not_allowed(hub: FakeHub, place: Place, args: tuple[str, ...]) -> None:
    hub.fail = always(Fault(status=403), "/api/")
    assert_refused(place.run(hub, *args), "refused", "403", "hf auth login")


# ---------------------------------------------------------------- --pretokenized


def assert_pretokenized(place: Place, repos: dict[str, Path], n_train: int) -> None:
    names = SHARDS[: n_train + 1]
    contents = {name: (repos[GPT2] / name).read_bytes() for name in names}
    assert shards_in(place.out) == contents
    assert sorted(os.listdir(place.out)) == sorted([*names, "dataset.json"])
    tokens = {name: open_shard(repos[GPT2] / name, 50257) for name in names}
    info = place.info()
    assert info["shards"] == [
        {"file": name, "tokens": len(tokens[name]), "sha256": hashlib.sha256(contents[name]).hexdigest()}
        for name in names
    ]
    for split, own in (("val", names[:1]), ("train", names[1:])):
        stream = np.concatenate([tokens[name] for name in own])
        assert info["splits"][split] == {
            "tokens": len(stream),
            "documents": int((stream == EOT).sum()),
            "shards": len(own),
            "sha256": hashlib.sha256(stream.tobytes()).hexdigest(),
        }
        assert TokenStream(place.out, split).read(0, len(stream)).tolist() == stream.tolist()
    assert (info["dataset"], info["tokenizer"], info["vocab_size"]) == ("fineweb", "gpt2", 50257)
    assert info["source"].startswith(f"{GPT2} at commit ")
    assert verify(place.out) == []


def test_pretokenized(hub: FakeHub, place: Place, repos: dict[str, Path]) -> None:
    """One shard, then more of them, then again with damaged ones."""
    assert_good(place.run(hub, "--pretokenized", "--shards", "1"))
    assert_pretokenized(place, repos, 1)
    assert sorted(fetched(hub)) == sorted(SHARDS[:2])

    hub.requests.clear()
    assert_good(place.run(hub, "--pretokenized"))
    assert_pretokenized(place, repos, 3)
    assert sorted(fetched(hub)) == SHARDS[2:]

    hub.requests.clear()
    for name, change in ((SHARDS[0], lambda raw: raw[:-2]), (SHARDS[2], lambda raw: raw[:-1] + b"\x01")):
        path = place.out / name
        path.write_bytes(change(path.read_bytes()))
    assert_good(place.run(hub, "--pretokenized", "--shards", "3"))
    assert_pretokenized(place, repos, 3)
    assert sorted(fetched(hub)) == sorted([SHARDS[0], SHARDS[2]])

    command = [sys.executable, str(ROOT / "data" / "shards.py"), "verify", str(place.out)]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 0


def test_pretokenized_with_fewer_shards(hub: FakeHub, place: Place) -> None:
    """Whatever is done with the third shard: the folder must be a dataset."""
    assert_good(place.run(hub, "--pretokenized", "--shards", "3"))
    assert_good(place.run(hub, "--pretokenized", "--shards", "2"))
    assert verify(place.out) == []
    TokenStream(place.out, "train")


@pytest.mark.parametrize("name", ["503", "429", "dropped", "reset", "corrupt"])
def test_pretokenized_gets_over_faults(hub: FakeHub, place: Place, repos: dict[str, Path], name: str) -> None:
    hub.fail = once(FAULTS[name], "/resolve/")
    assert_good(place.run(hub, "--pretokenized", patch=SMALL_CHUNKS))
    assert_pretokenized(place, repos, 3)
    assert Counter(fetched(hub)) == dict.fromkeys(SHARDS, 2)


def test_pretokenized_lasting_fault(hub: FakeHub, place: Place, repos: dict[str, Path]) -> None:
    hub.fail = always(Fault(corrupt=True), SHARDS[2])
    done = place.run(hub, "--pretokenized", patch="hub.TRIES = 3")
    assert_refused(
        done, f"{GPT2}: fetching {SHARDS[2]}: gave up after 3 tries (", "sha256", "run the same command again"
    )
    with pytest.raises(UserError, match="did not finish"):
        TokenStream(place.out, "train")
    assert SHARDS[2] not in shards_in(place.out)
    hub.fail = lambda method, path: None
    hub.requests.clear()
    assert_good(place.run(hub, "--pretokenized"))
    assert_pretokenized(place, repos, 3)
    assert fetched(hub) == SHARDS[2:3]


def test_pretokenized_killed(hub: FakeHub, place: Place, repos: dict[str, Path]) -> None:
    hub.fail = once(Fault(stall=60), SHARDS[2])
    process = place.start(hub, "--pretokenized")
    there = {SHARDS[0], SHARDS[1], SHARDS[3]}
    place.kill(process, lambda: place.incomplete() and shards_in(place.out).keys() == there)
    with pytest.raises(UserError, match="did not finish"):
        TokenStream(place.out, "train")
    hub.requests.clear()
    assert_good(place.run(hub, "--pretokenized"))
    assert_pretokenized(place, repos, 3)
    assert fetched(hub) == SHARDS[2:3]


def test_pretokenized_takes_what_is_whole(hub: FakeHub, place: Place, repos: dict[str, Path]) -> None:
    """From a folder of downloads that a kill has left, and from the hub's cache, which stays."""
    cached = fill_cache(hub, place, f"hf_hub_download({GPT2!r}, {SHARDS[1]!r}, repo_type='dataset')")
    downloads = place.out / "download"
    downloads.mkdir(parents=True)
    (downloads / SHARDS[2]).write_bytes((repos[GPT2] / SHARDS[2]).read_bytes())
    (downloads / SHARDS[3]).write_bytes((repos[GPT2] / SHARDS[3]).read_bytes()[:-1] + b"?")
    assert_good(place.run(hub, "--pretokenized"))
    assert_pretokenized(place, repos, 3)
    assert sorted(fetched(hub)) == sorted([SHARDS[0], SHARDS[3]])
    assert cache_of(place) == cached


def test_pretokenized_after_main_has_moved(
    hub: FakeHub, place: Place, repos: dict[str, Path], tmp_path: Path
) -> None:
    """Shards that are other ones now are fetched again: a dataset is of one commit."""
    assert_good(place.run(hub, "--pretokenized", "--shards", "1"))
    moved = tmp_path / "moved"
    write_gpt2_shards(moved, seed=1)
    (moved / SHARDS[0]).write_bytes((repos[GPT2] / SHARDS[0]).read_bytes())
    hub.move_main(MOVED, {GPT2: moved})
    hub.requests.clear()
    assert_good(place.run(hub, "--pretokenized", "--shards", "1"), MOVED)
    assert_pretokenized(place, {GPT2: moved}, 1)
    assert fetched(hub) == SHARDS[1:2]


GARBAGE = {
    "no shard": (b"x" * 3000, "magic number"),
    "cut off": (np.array([20240520, 1, 9] + [0] * 253, "<i4").tobytes(), "truncated"),
    "other vocabulary": (
        np.array([20240520, 1, 2] + [0] * 253, "<i4").tobytes() + b"\x00\x00\xff\xff",
        "token 65535 at position 1",
    ),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_pretokenized_refuses_what_is_no_shard(hub: FakeHub, place: Place, name: str) -> None:
    content, part = GARBAGE[name]
    hub.commits[COMMIT][GPT2][SHARDS[2]] = content
    assert_refused(place.run(hub, "--pretokenized"), SHARDS[2], part)
    assert SHARDS[2] not in shards_in(place.out)
    with pytest.raises(UserError, match="did not finish"):
        TokenStream(place.out, "train")


def test_pretokenized_wrong_arguments(hub: FakeHub, place: Place, repos: dict[str, Path]) -> None:
    done = place.run(hub, "--pretokenized", "--shards", "4")
    assert_refused(done, "--shards 4", f"{GPT2} has 1 validation and 3 training shards")
    assert not place.out.exists()
    place.out.mkdir()
    for name in ("python_bytes_train_000001.bin", "manifest.jsonl"):
        other = place.out / name
        other.write_bytes(b"something else")
        assert_refused(place.run(hub, "--pretokenized"), f"{place.out}: holds {name}", "another --out")
        assert {path.name: path.read_bytes() for path in place.out.iterdir()} == {name: b"something else"}
        other.unlink()
    place.out.rmdir()
    place.out.write_bytes(b"a file")
    assert_refused(place.run(hub, "--pretokenized"), str(place.out))


@pytest.mark.parametrize(
    "args", [("--edu",), ("--revision", "v9"), ("--sample", "100BT"), ("--max-tokens", "200000000")]
)
def test_pretokenized_refuses_options_it_does_not_read(
    hub: FakeHub, place: Place, args: tuple[str, ...]
) -> None:
    assert_refused(place.run(hub, "--pretokenized", "--shards", "1", *args), args[0])


# ---------------------------------------------------------------- the disk


def test_pretokenized_needs_room(hub: FakeHub, place: Place) -> None:
    patch = (
        "import shutil, types; shutil.disk_usage = lambda path: types.SimpleNamespace(free=11000)"  # 2 of 4
    )
    done = place.run(hub, "--pretokenized", patch=patch)
    assert_refused(done, f"{place.out}: 0.0 GB free: expected 0.0 GB for 4 shards")
    assert fetched(hub) == []
    assert_good(place.run(hub, "--pretokenized", "--shards", "1", patch=patch.replace("11000", "16000")))
    # for two more shards there is room, if what is there counts
    assert_good(place.run(hub, "--pretokenized", patch=patch.replace("11000", "16000")))


def test_fineweb_needs_room(hub: FakeHub, place: Place) -> None:
    patch = "import shutil, types; shutil.disk_usage = lambda path: types.SimpleNamespace(free=9)"
    assert_refused(place.run(hub, patch=patch), f"{place.out}: 0.0 GB free: expected about", "--max-tokens")
    assert fetched(hub) == []


@pytest.mark.parametrize("args", [(), ("--pretokenized",)], ids=["fineweb", "pretokenized"])
def test_a_disk_that_is_full_in_mid_download(hub: FakeHub, place: Place, args: tuple[str, ...]) -> None:
    """It is not tried again. The limit is the system's, and the error comes from inside huggingface_hub."""
    patch = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))"
    done = place.run(hub, *(args or ("--shard-size", "7000")), patch=patch)
    assert_refused(done, "fetching ", f": {os.strerror(errno.EFBIG)}")
    assert max(Counter(fetched(hub)).values()) == 1
    assert place.downloads() == []


# ---------------------------------------------------------------- with_retries and damage


class ConnectError(Exception):
    """As the HTTP libraries call theirs."""


class HTTPError(OSError):
    def __init__(self, status: int) -> None:
        super().__init__(f"{status}\nof the hub")
        self.response = type("Response", (), {"status_code": status})


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    sleeps: list[float] = []
    monkeypatch.setattr(hub_module.time, "sleep", sleeps.append)
    return sleeps


def failing(*errors: Exception) -> Callable[[], str]:
    """An action that raises these, one at a time, and then returns."""
    left = list(errors)

    def action() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return action


def test_retries_wait_twice_as_long_each_time(sleeps: list[float], capfd: pytest.CaptureFixture[str]) -> None:
    notes: list[str] = []
    errors = [OSError("gone"), ConnectError("refused"), ValueError("half a JSON"), HTTPError(503)]
    assert with_retries(failing(*errors), "it", notes.append) == "done"
    assert sleeps == [1, 2, 4, 8]
    assert notes == [
        "try 2 of 8 in 1 s: OSError: gone",
        "try 3 of 8 in 2 s: ConnectError: refused",
        "try 4 of 8 in 4 s: ValueError: half a JSON",
        "try 5 of 8 in 8 s: HTTPError: 503 of the hub",
    ]
    assert capfd.readouterr() == ("", "")
    assert with_retries(failing(OSError("gone")), "it") == "done"
    assert capfd.readouterr() == ("", "it: try 2 of 8 in 1 s: OSError: gone\n")


def test_retries_end(sleeps: list[float]) -> None:
    with pytest.raises(UserError) as error:
        with_retries(failing(*[OSError(f"a\n{'b' * 999}")] * 99), "it", lambda note: None)
    assert sleeps == [1, 2, 4, 8, 16, 32, 60]
    assert str(error.value).startswith("it: gave up after 8 tries (OSError: a bbb")
    assert "\n" not in str(error.value) and len(str(error.value)) < 500
    assert "b); run the same command again to go on; " in str(error.value)
    for hint in HINTS:
        assert hint in str(error.value)


def test_the_cause_is_told(sleeps: list[float]) -> None:
    error, notes = OSError("the hub's words"), []  # type: ignore[var-annotated]
    error.__cause__ = ConnectError("the reason")
    assert with_retries(failing(error), "it", notes.append) == "done"
    assert notes == ["try 2 of 8 in 1 s: ConnectError: the reason"]


@pytest.mark.parametrize("status", [400, 401, 403])
def test_a_refusal_is_final(sleeps: list[float], status: int) -> None:
    with pytest.raises(UserError, match=rf"^it: refused \(HTTPError: {status} of the hub\); .*hf auth login"):
        with_retries(failing(HTTPError(status)), "it")
    assert sleeps == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES])
def test_a_disk_that_refuses_is_final(sleeps: list[float], code: int) -> None:
    with pytest.raises(UserError) as error:
        with_retries(failing(OSError(code, os.strerror(code), "/somewhere")), "it")
    assert str(error.value) == f"it: {os.strerror(code)}"
    assert sleeps == []


def test_only_the_first_request_needs_no_patience(sleeps: list[float]) -> None:
    wrapped = OSError("the hub's words")
    wrapped.__cause__ = ConnectError("Connection refused")
    for error in (ConnectError("Connection refused"), wrapped):
        assert with_retries(failing(error), "it", lambda note: None) == "done"
    assert sleeps == [1, 1]
    with pytest.raises(UserError) as raised:
        with_retries(failing(ConnectError("Connection refused")), "it", first=True)
    assert str(raised.value).startswith("it: the hub cannot be reached (ConnectError: Connection refused); ")
    for hint in HINTS:
        assert hint in str(raised.value)
    assert with_retries(failing(HTTPError(503)), "it", lambda note: None, first=True) == "done"
    assert sleeps == [1, 1, 1]


def test_what_no_retry_can_help_passes(sleeps: list[float]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        with_retries(interrupted, "it")
    with pytest.raises(UserError, match="^mine$"):
        with_retries(failing(UserError("mine")), "it")
    assert sleeps == []


def test_damage(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    sha256 = hashlib.sha256(b"abc").hexdigest()
    wrong = hashlib.sha256(b"abd").hexdigest()
    assert damage(path, HubFile("file", 3, sha256)) == ""
    assert damage(path, HubFile("file", 3, "")) == ""
    assert damage(path, HubFile("file", 4, sha256)) == "3 bytes arrived: expected 4"
    assert damage(path, HubFile("file", 2, "")) == "3 bytes arrived: expected 2"
    expected = f"sha256 {sha256[:12]}... arrived: expected {wrong[:12]}..."
    assert damage(path, HubFile("file", 3, wrong)) == expected
    path.write_bytes(b"")
    assert damage(path, HubFile("file", 0, hashlib.sha256().hexdigest())) == ""
