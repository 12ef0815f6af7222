"""data.pretokenized: what is fetched, compared, kept and rejected. The hub is a local folder."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import flip, one_line, write_shard

from data import pretokenized
from data.dataset import TokenStream, dataset_info
from data.pretokenized import REPO, fetch
from data.verify import verify
from infra.cli import UserError

COMMIT = "ab" * 20


class Hub:
    """In place of huggingface_hub's API and snapshot_download: a folder, and what was fetched from it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.fetched: list[str] = []
        self.sha256: dict[str, str] = {}
        rng = np.random.default_rng(0)
        for label in ("val_000000", "train_000001", "train_000002", "train_000003"):
            tokens = rng.integers(0, 50256, 500)
            tokens[::100] = 50256
            self.sha256[f"fineweb_{label}.bin"] = write_shard(folder / f"fineweb_{label}.bin", tokens)

    def dataset_info(self, repo: str, **options: Any) -> Any:
        assert repo == REPO
        files = [SimpleNamespace(rfilename="README.md", lfs=None)]
        for file, sha256 in self.sha256.items():
            files.append(SimpleNamespace(rfilename=file, lfs=SimpleNamespace(sha256=sha256)))
        return SimpleNamespace(sha=COMMIT, siblings=files)

    def snapshot_download(
        self, repo: str, *, repo_type: str, revision: str, allow_patterns: list[str], local_dir: Path
    ) -> None:
        assert (repo, repo_type, revision) == (REPO, "dataset", COMMIT)
        for file in allow_patterns:
            if not (local_dir / file).exists():
                shutil.copy(self.folder / file, local_dir)
                self.fetched.append(file)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(tmp_path / "hub")
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot_download)
    return hub


def test_all_or_some_shards(tmp_path: Path, hub: Hub, call: Any, capsys: Any) -> None:
    """The first n of them; more later; what is there stays, and is compared again."""
    out = tmp_path / "out"
    call(pretokenized, "--shards", 1, "--out", out)
    assert "500 gpt2 tokens, 5 documents, 1 shards" in capsys.readouterr().out
    assert hub.fetched == ["fineweb_val_000000.bin", "fineweb_train_000001.bin"]
    info = dataset_info(out)
    assert (info["source"], info["tokenizer"]) == (f"{REPO} at commit {COMMIT}", "gpt2")
    assert [file["sha256"] for file in info["shards"]] == [hub.sha256[file] for file in hub.fetched]
    fetch(out, None)
    assert hub.fetched[2:] == ["fineweb_train_000002.bin", "fineweb_train_000003.bin"]
    assert TokenStream(out, "train").n_tokens == 1500
    assert len(fetch(out, 2)["shards"]) == 4 and len(hub.fetched) == 4
    verify(out)


@pytest.mark.parametrize("damage", ["bit", "truncated"])
def test_damaged_shards_are_deleted_and_fetched_anew(tmp_path: Path, hub: Hub, damage: str) -> None:
    out = tmp_path / "out"
    fetch(out, 2)
    path = out / "fineweb_train_000002.bin"
    if damage == "bit":
        flip(path, -3)
    else:
        os.truncate(path, 2000)
    with one_line(path, "run the same command again"):
        fetch(out, 2)
    with pytest.raises(UserError, match="did not finish"):
        TokenStream(out, "train")
    fetch(out, 2)
    verify(out)
    assert hub.fetched.count(path.name) == 2


def test_rejections_are_one_line(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    with one_line("--shards 4", "has 3 training shards"):
        fetch(out, 4)
    assert not out.exists()
    out.mkdir()
    foreign = out / "manifest.jsonl"
    foreign.write_bytes(b"precious")
    with one_line(foreign.name, "choose another --out"):
        fetch(out, 1)
    assert foreign.read_bytes() == b"precious"
    foreign.unlink()

    def unreachable(*args: Any, **options: Any) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with one_line(REPO, "no route to host", "run the same command again"):
        fetch(out, 1)
    assert hub.fetched == []
