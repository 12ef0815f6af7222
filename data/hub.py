"""Files of a dataset on the Hugging Face hub: list them at a fixed commit, fetch them, check every byte.

The transfer itself is `huggingface_hub`'s. Here is what it leaves to its caller: to fail within seconds when
there is no network, to go on trying for minutes when there was one, to compare sha256 with what the hub
lists, and to make no noise. Nothing here needs the network with HF_HUB_OFFLINE=1: files then come from the
hub's cache.
"""

from __future__ import annotations

import errno
import hashlib
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from infra.cli import UserError

TRIES = 8
LONGEST_WAIT = 60.0  # seconds; the tries wait 1 + 2 + 4 + ... + 60: together about two minutes
NO_NETWORK = (
    "without a network, --files 'dir/*.parquet' reads local files, and HF_HUB_OFFLINE=1 takes what is in the "
    "hub's cache, also for --pretokenized"
)
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.ENOTDIR)
T = TypeVar("T")


@dataclass(frozen=True)
class HubFile:
    """A file of a dataset: its path there, its size and, where the hub keeps one, its sha256."""

    name: str
    n_bytes: int
    sha256: str


class HubDataset:
    """A dataset at one commit.

    Args:
        revision: branch, tag or commit; a full commit is taken as it is.
        wanted: patterns of the files that must be in the hub's cache if that is all there is.
    Attributes:
        name, commit: which.
    Raises:
        UserError: no network, no such dataset or revision.
    """

    def __init__(self, name: str, revision: str = "main", wanted: str | list[str] = "*") -> None:
        from huggingface_hub import HfApi, constants, snapshot_download
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
        from huggingface_hub.utils import logging

        logging.set_verbosity_error()  # its retries would be printed across the progress bar
        self.name, self.commit = name, revision
        self.offline = bool(constants.HF_HUB_OFFLINE)
        if re.fullmatch("[0-9a-f]{40}", revision) and not self.offline:
            return  # a run that goes on, or has nothing to do, needs no answer from the hub so far
        try:
            if self.offline:
                cached = snapshot_download(
                    name, repo_type="dataset", revision=revision, local_files_only=True, allow_patterns=wanted
                )
                self._cached = Path(cached)
                self.commit = self._cached.name
            else:
                info = with_retries(
                    lambda: HfApi().dataset_info(name, revision=revision, timeout=10), name, first=True
                )
                self.commit = str(info.sha)
        except RepositoryNotFoundError:
            raise UserError(f"{name}: no such dataset on {constants.ENDPOINT}, or not for you") from None
        except RevisionNotFoundError:
            raise UserError(f"--revision {revision}: {name} has no such branch, tag or commit") from None
        except FileNotFoundError:
            raise UserError(
                f"{name}: HF_HUB_OFFLINE is set and {revision} is not whole in the hub's cache; {NO_NETWORK}"
            ) from None

    def files(self, folder: str) -> list[HubFile]:
        """The files right in a folder ("" is the top one), by name.

        Raises:
            UserError: no such folder, or the hub does not answer.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RemoteEntryNotFoundError
        from huggingface_hub.hf_api import RepoFile

        if self.offline:
            paths = sorted(path for path in (self._cached / folder).glob("*") if path.is_file())
            return [
                HubFile(path.relative_to(self._cached).as_posix(), path.stat().st_size, "") for path in paths
            ]
        list_tree = partial(HfApi().list_repo_tree, self.name, revision=self.commit, repo_type="dataset")
        try:
            entries = with_retries(
                lambda: list(list_tree(folder or None)),
                f"{self.name}: listing {folder or 'its files'}",
            )
        except RemoteEntryNotFoundError:
            raise UserError(f"{self.name}: no folder {folder} at {self.commit[:12]}") from None
        files = [
            HubFile(entry.path, entry.size, entry.lfs.sha256 if entry.lfs else "")
            for entry in entries
            if isinstance(entry, RepoFile)
        ]
        return sorted(files, key=lambda file: file.name)


class Download(threading.Thread):
    """A file on its way into a folder, or found there or in the hub's cache. Starts at once.

    A daemon: a program that stops does not wait for it.

    Attributes:
        n_bytes: how much of it is there.
        note: what went wrong last, for a progress bar.
    """

    def __init__(self, dataset: HubDataset, file: HubFile, folder: Path) -> None:
        super().__init__(daemon=True)
        self.dataset, self.file, self.folder = dataset, file, folder
        self.n_bytes = 0
        self.note = ""
        self._path: Path | None = None
        self._error: UserError | None = None
        self.start()

    def result(self, while_waiting: Callable[[], Any] = lambda: None) -> Path:
        """Where the file is, once it is there and every byte is checked.

        Args:
            while_waiting: called twice a second.
        Raises:
            UserError: it could not be fetched.
        """
        while self.is_alive():
            self.join(0.5)
            while_waiting()
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path

    def run(self) -> None:
        try:
            self._path = self._there() or self._in_cache() or self._fetch()
            self.n_bytes = self.file.n_bytes
        except UserError as e:  # for `result`, in the thread that waits
            self._error = e
        except Exception as e:
            reason = " ".join(f"{type(e).__name__}: {e}".split())[:200]
            self._error = UserError(f"{self.dataset.name}: fetching {self.file.name}: {reason}")

    def _there(self) -> Path | None:
        path = self.folder / self.file.name
        return path if path.is_file() and not damage(path, self.file) else None

    def _in_cache(self) -> Path | None:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(
            self.dataset.name, self.file.name, repo_type="dataset", revision=self.dataset.commit
        )
        path = Path(found) if isinstance(found, str) else None
        if path and not damage(path, self.file):
            return path
        if self.dataset.offline:
            raise UserError(
                f"{self.dataset.name}: HF_HUB_OFFLINE is set and {self.file.name} is not whole in the hub's "
                f"cache; {NO_NETWORK}"
            )
        return None

    def _fetch(self) -> Path:
        def tell(note: str) -> None:
            self.note = note

        what = f"{self.dataset.name}: fetching {self.file.name}"
        return with_retries(self._fetch_once, what, tell)

    def _fetch_once(self) -> Path:
        from huggingface_hub import hf_hub_download

        download = self
        download.n_bytes = 0

        class Meter(tqdm):  # type: ignore[type-arg]
            """Tells the download how far it is, and prints nothing."""

            def __init__(self, total: int | None = None, initial: int = 0, **other: Any) -> None:
                super().__init__(disable=True)
                download.n_bytes = initial

            def update(self, n: float | None = 1) -> None:
                download.n_bytes += int(n or 0)
                download.note = ""

        path = Path(
            hf_hub_download(
                self.dataset.name,
                self.file.name,
                repo_type="dataset",
                revision=self.dataset.commit,
                local_dir=self.folder,
                force_download=True,  # what lies there has been looked at, and is not the file
                tqdm_class=Meter,
            )
        )
        problem = damage(path, self.file)
        if problem:
            path.unlink()
            raise OSError(problem)
        return path


def damage(path: Path, file: HubFile) -> str:
    """What is wrong with a fetched file, or "". Reads all of it."""
    n_bytes = path.stat().st_size
    if n_bytes != file.n_bytes:
        return f"{n_bytes} bytes arrived: expected {file.n_bytes}"
    if not file.sha256:
        return ""
    with open(path, "rb") as f:
        found = hashlib.file_digest(f, "sha256").hexdigest()
    return "" if found == file.sha256 else f"sha256 {found[:12]}... arrived: expected {file.sha256[:12]}..."


def clear_downloads(folder: Path) -> None:
    """Remove what killed downloads have left: each starts a file of its own, and never looks at it again."""
    for path in folder.rglob("*.incomplete"):
        path.unlink(missing_ok=True)


def remove_downloads(folder: Path) -> None:
    """Remove a folder of downloads with all that is in it."""
    shutil.rmtree(folder, ignore_errors=True)


def with_retries(
    action: Callable[[], T], what: str, tell: Callable[[str], None] | None = None, first: bool = False
) -> T:
    """What `action()` returns, tried again after network faults for about two minutes.

    Args:
        what: it does, for the message.
        tell: gets a few words on each failure; None: they are printed.
        first: the first request of all: if there is no connection then, there is no network.
    Raises:
        UserError: the last word. Errors that trying again cannot help are raised as they are.
    """
    from huggingface_hub import errors

    absent = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.RemoteEntryNotFoundError)
    ours = (UserError, TypeError, AttributeError, NameError, LookupError)
    for attempt in range(TRIES):
        try:
            return action()
        except (*ours, *absent):
            raise
        except Exception as e:  # which library's errors these are depends on huggingface_hub's version
            cause = e.__cause__ or e
            reason = " ".join(f"{type(cause).__name__}: {cause}".split())[:160]
            status = getattr(getattr(cause, "response", None), "status_code", None)
            if isinstance(e, OSError) and e.errno is not None and e.errno in DISK_ERRORS:
                raise UserError(f"{what}: {e.strerror}") from None
            if status in (400, 401, 403):
                raise UserError(f"{what}: refused ({reason}); `hf auth login` may help") from None
            if first and type(e).__name__ in (
                "ConnectError",
                "ConnectTimeout",
                "ConnectionError",
                "ProxyError",
            ):
                raise UserError(f"{what}: the hub cannot be reached ({reason}); {NO_NETWORK}") from None
            wait = min(2.0**attempt, LONGEST_WAIT)
            if attempt + 1 == TRIES:
                break
            note = f"try {attempt + 2} of {TRIES} in {wait:.0f} s: {reason[:60]}"
            tell(note) if tell else print(f"{what}: {note}", file=sys.stderr)
            time.sleep(wait)
    raise UserError(
        f"{what}: gave up after {TRIES} tries ({reason}); run the same command again to go on; {NO_NETWORK}"
    )
