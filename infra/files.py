"""Files that are whole or absent, JSON, JSON lines, and a lock on a folder."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from infra.cli import UserError


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A binary file that appears under its name once it is complete and on disk.

    Raises UserError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    except OSError as e:
        raise UserError(f"{path}: cannot be written: {e.strerror or e}") from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_atomically(path: Path, *parts: bytes | memoryview) -> None:
    """The concatenated parts as an `atomic_file`."""
    with atomic_file(path) as f:
        f.writelines(parts)


def append_synced(path: Path, addition: str) -> None:
    """Append a text and sync it to disk. Raises UserError: it cannot be written."""
    try:
        with open(path, "a", encoding="utf-8") as f:
            f.write(addition)
            f.flush()
            os.fsync(f.fileno())
    except OSError as e:
        raise UserError(f"{path}: cannot be written: {e.strerror}") from None


def write_json(value: Any, path: Path) -> None:
    """Raises UserError: NaN or infinity, which JSON does not have; or it cannot be written."""
    try:
        document = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    except ValueError as e:
        raise UserError(f"{path}: not written: {e}") from None
    write_atomically(path, f"{document}\n".encode())


def read_json(path: Path) -> Any:
    """Raises UserError: cannot be read, or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise UserError(f"{path}: cannot be read: {e.strerror}") from None
    except ValueError as e:
        raise UserError(f"{path}: not valid JSON: {e}") from None


def read_jsonl(path: Path) -> list[Any]:
    """The records of a JSON-lines file, without a line that was truncated by a kill; [] if it is absent."""
    records = []
    for line in path.read_text("utf-8", errors="replace").splitlines() if path.exists() else []:
        with suppress(ValueError):
            records.append(json.loads(line))
    return records


@contextmanager
def exclusive_lock(folder: Path) -> Iterator[None]:
    """Make the folder and lock it, where its file system can. Left empty, it is removed.

    Raises UserError: another process holds the lock, or the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as e:
        raise UserError(f"{folder}: cannot be written: {e.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released by the system on exit or kill
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(f"{folder}: another process is writing there") from None
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        with suppress(OSError):
            folder.rmdir()
        os.close(descriptor)
