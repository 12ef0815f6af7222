"""data.fineweb --pretokenized: what is fetched, compared, kept and rejected. The hub is a local folder."""

from __future__ import annotations

import fnmatch
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import one_line, write_shard

from data.dataset import TokenStream, dataset_info
from data.pretokenized import PRETOKENIZED, fetch_pretokenized
from data.verify import verify
from infra.cli import UserError


class Hub:
    """In place of huggingface_hub's API and snapshot_download: a folder, and what was fetched from it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.fetched, self.calls = folder, [], 0  # type: ignore[var-annotated]
        folder.mkdir(parents=True)
        rng = np.random.default_rng(0)
        self.sha256 = {"README.md": ""}
        (folder / "README.md").write_text("shards")
        (folder.parent / "blobs").mkdir()
        for name in ("val_000000", "train_000001", "train_000002", "train_000003"):
            tokens = rng.integers(0, 50257, 500)
            tokens[::100] = 50256
            name = f"fineweb_{name}.bin"
            self.sha256[name] = write_shard(folder / name, tokens)
            blob = (folder / name).rename(folder.parent / "blobs" / self.sha256[name])
            (folder / name).symlink_to(blob)  # as in the hub's cache
        monkeypatch.setattr("huggingface_hub.HfApi", lambda: self)
        monkeypatch.setattr("huggingface_hub.snapshot_download", self.snapshot_download)

    def dataset_info(self, name: str, **options: Any) -> Any:
        assert name == PRETOKENIZED
        files = [
            type("File", (), {"rfilename": name, "size": 1, "lfs": type("Lfs", (), {"sha256": sha256})})
            for name, sha256 in self.sha256.items()
        ]
        return type("Info", (), {"sha": "ab" * 20, "siblings": files})

    def snapshot_download(
        self,
        name: str,
        *,
        repo_type: str,
        allow_patterns: list[str],
        revision: str = "main",
        local_dir: Any = None,
    ) -> str:
        assert (name, repo_type) == (PRETOKENIZED, "dataset")
        if local_dir is None:  # the hub's cache
            return str(self.folder)
        assert revision == "ab" * 20
        for path in sorted(self.folder.iterdir()):
            wanted = any(fnmatch.fnmatch(path.name, pattern) for pattern in allow_patterns)
            if wanted and not (Path(local_dir) / path.name).exists():
                shutil.copy(path, local_dir)
                self.fetched.append(path.name)
        return str(local_dir)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    return Hub(tmp_path / "hub" / ("ab" * 20), monkeypatch)


def test_all_or_some_shards(tmp_path: Path, hub: Hub) -> None:
    """The first n of them; more later; what is there stays, and is compared again."""
    out = tmp_path / "out"
    info = fetch_pretokenized(out, 1)
    assert hub.fetched == ["fineweb_train_000001.bin", "fineweb_val_000000.bin"]
    assert info == dataset_info(out) and info["source"] == f"{PRETOKENIZED} at commit {'ab' * 20}"
    assert info["splits"]["train"]["documents"] == 5 and info["tokenizer"] == "gpt2"
    assert [file["sha256"] for file in info["shards"]] == [
        hub.sha256[f"fineweb_{name}.bin"] for name in ("val_000000", "train_000001")
    ]
    fetch_pretokenized(out, None)
    assert hub.fetched[2:] == ["fineweb_train_000002.bin", "fineweb_train_000003.bin"]
    assert TokenStream(out, "train").n_tokens == 1500
    assert len(fetch_pretokenized(out, 2)["shards"]) == 4 and len(hub.fetched) == 4
    verify(out)


@pytest.mark.parametrize("damage", ["bit", "truncated", "no shard"])
def test_damaged_shards_are_deleted_and_fetched_anew(tmp_path: Path, hub: Hub, damage: str) -> None:
    out = tmp_path / "out"
    fetch_pretokenized(out, 2)
    path = out / "fineweb_train_000002.bin"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes({"bit": bytes(data), "truncated": bytes(data[:-2]), "no shard": b"x" * 2024}[damage])
    with one_line(path, "run the same command again"):
        fetch_pretokenized(out, 2)
    with pytest.raises(UserError, match="did not finish"):
        TokenStream(out, "train")
    fetch_pretokenized(out, 2)
    verify(out)
    assert hub.fetched.count(path.name) == 2


def test_offline_from_the_cache(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    info = fetch_pretokenized(tmp_path / "out", 2)
    assert info["source"].endswith("ab" * 20) and hub.fetched == []
    for file in info["shards"]:
        assert file["sha256"] == hub.sha256[file["file"]]
    verify(tmp_path / "out")


def test_rejections_are_one_line(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"

    def refused(n_train: int | None, *parts: str) -> None:
        with one_line(*parts):
            fetch_pretokenized(out, n_train)

    refused(4, "--shards 4", "has 1 validation and 3 training shards")
    assert not out.exists()
    out.mkdir()
    (out / "toy_train_000001.bin").write_bytes(b"precious")
    refused(1, "toy_train_000001.bin", "choose another --out")
    (out / "toy_train_000001.bin").unlink()

    def unreachable(*args: Any, **options: Any) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    refused(1, "no route to host", "run the same command again", "HF_HUB_OFFLINE=1")
    monkeypatch.setattr(hub, "dataset_info", unreachable)
    refused(1, PRETOKENIZED, "no route to host", "HF_HUB_OFFLINE=1")
    assert hub.fetched == []
