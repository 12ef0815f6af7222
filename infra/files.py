"""Files that are whole or absent, JSON, JSON lines, the shape of what they hold, and locks."""

import errno
import fcntl
import json
import os
import platform
import reprlib
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import BaseModel, ValidationError

from infra.cli import UserError


def why_not_written(path: Path, error: Exception, n_bytes: int = 0) -> str:
    """The message of a write that failed; n_bytes: of the whole file, if they are known."""
    message = f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}"
    free = shutil.disk_usage(path.parent).free if path.parent.is_dir() else n_bytes
    if free < n_bytes or getattr(error, "errno", 0) in (errno.ENOSPC, errno.EDQUOT):
        needed = f", {n_bytes / 1e9:.2g} needed" if n_bytes else ""
        message += f" (disk full: {free / 1e9:.2g} GB free{needed})"
    return message


@contextmanager
def atomic_file(path: Path, shared: bool = False, n_bytes: int = 0) -> Iterator[BinaryIO]:
    """A binary file that appears under its name once it is complete and on disk.

    Where it is shared another process may write it at the same time, and the last to finish wins.
    Elsewhere the next writer replaces what a killed one has left, a link too. n_bytes: how large it
    gets, for the message of a full disk. Raises UserError: it cannot be written.
    """
    unique = f".{secrets.token_hex(4)}" if shared else ""
    temporary = path.with_name(f".{path.name}{unique}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        try:
            with open(temporary, "xb") as f:  # never through a link
                yield f
                f.flush()
                os.fsync(f.fileno())
            os.replace(temporary, path)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    except OSError as e:
        raise UserError(why_not_written(path, e, n_bytes)) from None


def write_atomically(path: Path, *parts: bytes | memoryview) -> None:
    """The concatenated parts as an `atomic_file`."""
    with atomic_file(path, n_bytes=sum(memoryview(part).nbytes for part in parts)) as f:
        f.writelines(parts)


def append_synced(path: Path, addition: str) -> None:
    """Append a text and sync it to disk. Raises UserError: it cannot be written."""
    try:
        with open(path, "a", encoding="utf-8") as f:
            f.write(addition)
            f.flush()
            os.fsync(f.fileno())
    except OSError as e:
        raise UserError(why_not_written(path, e)) from None


def write_json(value: Any, path: Path, shared: bool = False) -> None:
    """Raises UserError: NaN or infinity, which JSON does not have; or it cannot be written."""
    try:
        document = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as e:
        raise UserError(f"{path}: not written: {e}") from None
    with atomic_file(path, shared) as f:
        f.write(document + b"\n")


def read_text(path: Path) -> str:
    """Raises UserError: cannot be read, or no UTF-8."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{path}: cannot be read as UTF-8 text: {e}") from None


def check_shape(content: Any, shape: type[BaseModel], where: object) -> Any:
    """The content, if it has the fields of `shape`. Raises UserError: the first one that does not
    fit.
    """
    try:
        shape.model_validate(content)
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"])) or "the content"
        value = (
            ""
            if first["type"] == "missing"
            else f" = {' '.join(reprlib.repr(first['input']).split())}"
        )
        raise UserError(f"{where}: {key}{value}: {first['msg']}") from None
    return content


def fingerprint(path: Path) -> str:
    """A sha256 over a file's size, first and last 64 KB: enough to notice a change."""
    with open(path, "rb") as f:
        size = os.fstat(f.fileno()).st_size
        digest = sha256(str(size).encode() + f.read(2**16))
        f.seek(max(0, size - 2**16))
        digest.update(f.read())
    return digest.hexdigest()


def read_json(path: Path, shape: type[BaseModel] | None = None) -> Any:
    """A JSON object. Raises UserError: cannot be read, is none, or lacks the fields of `shape`."""
    text = read_text(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path}: not valid JSON: {e}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object")
    return check_shape(content, shape, path) if shape else content


def read_jsonl(path: Path) -> list[Any]:
    """The objects of a JSON-lines file, without a line that was truncated by a kill; [] if it is no
    file.

    Raises OSError: it cannot be read.
    """
    records = []
    for line in path.read_text("utf-8", errors="replace").split("\n") if path.is_file() else ():
        with suppress(ValueError, RecursionError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


@contextmanager
def exclusive_lock(folder: Path) -> Iterator[None]:
    """Make the folder and lock `.lock` in it, where its file system can. The file stays.

    The lock is a file's, since NFS passes no lock of a folder on to other machines, and says who
    holds it. There is none in a read-only folder, which the writer names, or where another user's
    file stands. Raises UserError: another process holds the lock, or the folder or the file cannot
    be made.
    """
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK  # no link, no pipe
            lock = stack.enter_context(open(os.open(folder / ".lock", flags, 0o666), "r+b", 0))
        except OSError as e:
            if not folder.is_dir() or e.errno not in (errno.EACCES, errno.EROFS):
                raise UserError(f"{folder}: cannot be written: {e.strerror}") from None
        else:
            try:
                # released by the system on exit or kill
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = lock.read(200).decode("utf-8", "replace").strip() or "it"
                raise UserError(
                    f"{folder}: another process is writing there: wait for {holder}, "
                    "stop it, or choose another name or folder"
                ) from None
            except OSError:  # a file system without locks
                pass
            else:
                with suppress(OSError):  # as on a full disk
                    lock.truncate()
                    lock.write(f"process {os.getpid()} of {platform.node()}\n".encode())
        yield
