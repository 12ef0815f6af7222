"""A small fake of the Hugging Face hub: folders served as dataset repos on 127.0.0.1, with faults on request.

It is enough for the real `huggingface_hub` client, run in a subprocess with HF_ENDPOINT set to `FakeHub.url`:
`HfApi.dataset_info`, `HfApi.list_repo_tree` (in pages), `hf_hub_download` and `snapshot_download`.
It is not the hub: one branch, whose commits span all repos, public datasets only, no writing, no Xet storage,
no redirect of large files to a CDN. An unknown repo is a 404 with the hub's error code (the hub gives
strangers a 401, which only over https is a missing repo to the client). The files are read into memory at the
start.
"""

import hashlib
import json
import re
import socket
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
Repos = dict[str, dict[str, bytes]]  # repo id -> path -> content
PLAIN = (".md", ".gitattributes")  # stored in git itself: no `lfs` in the listing, git's sha1 as ETag


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one request; the parts can be combined."""

    status: int = 0  # this HTTP status in place of the answer ...
    retry_after: int | None = None  # ... with this Retry-After header
    delay: float = 0  # seconds before the answer begins
    stall: float = 0  # seconds without a byte in the middle of the body
    drop_after: int | None = None  # the connection is closed after so many bytes of the body ...
    reset: bool = False  # ... with a TCP reset, not in good order
    corrupt: bool = False  # one bit of the body's last byte is flipped; the length is right


class FakeHub:
    """Serves `repos` (repo id -> folder) from entering to leaving the `with` block."""

    def __init__(self, repos: dict[str, Path]) -> None:
        self.commit = COMMIT  # what "main" is; this and those before it are the known revisions
        self.page_size = 1000  # entries per page of a listing
        self.requests: list[tuple[str, str, str]] = []  # (method, path without the query, Range header or "")
        self.fail: Callable[[str, str], Fault | None] = lambda method, path: None  # asked at every request
        self.closing = threading.Event()
        self.commits = {COMMIT: read_repos(repos)}
        self._server = _Server(("127.0.0.1", 0), partial(_Handler, self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def move_main(self, commit: str, repos: dict[str, Path]) -> None:
        """A new commit; the old ones stay."""
        self.commits[commit] = read_repos(repos)
        self.commit = commit

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()  # ends the stalls
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client that went away is no error
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, hub: FakeHub, *args: Any) -> None:
        self.hub = hub
        super().__init__(*args)

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.hub.requests.append((self.command, unquote(path), self.headers.get("Range", "")))
        self.fault = self.hub.fail(self.command, unquote(path)) or Fault()
        self.hub.closing.wait(self.fault.delay)
        if self.fault.status:
            after = self.fault.retry_after
            headers = {} if after is None else {"Retry-After": str(after)}
            return self.send(self.fault.status, b"a fault of the fake hub", headers)
        for repo in self.hub.commits[self.hub.commit]:
            name = re.escape(repo)
            if match := re.fullmatch(f"/api/datasets/{name}(?:/revision/([^/]+))?", path):
                return self.info(repo, match[1] or "main")
            if match := re.fullmatch(f"/api/datasets/{name}/tree/([^/]+)(?:/(.*))?", path):
                return self.tree(repo, match[1], unquote(match[2] or ""))
            if match := re.fullmatch(f"/datasets/{name}/resolve/([^/]+)/(.+)", path):
                return self.resolve(repo, match[1], unquote(match[2]))
        self.error("RepoNotFound", "Repository not found")

    do_HEAD = do_GET

    def info(self, repo: str, revision: str) -> None:
        if commit := self.commit(revision):
            siblings = [{"rfilename": name} for name in self.hub.commits[commit][repo]]
            self.json({"id": repo, "sha": commit, "private": False, "siblings": siblings})

    def tree(self, repo: str, revision: str, folder: str) -> None:
        if not (commit := self.commit(revision)):
            return
        files = self.hub.commits[commit][repo]
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        recursive, base = query.get("recursive", "false"), PurePosixPath(folder)
        entries: dict[PurePosixPath, dict[str, Any]] = {}
        for name, content in files.items():
            file = PurePosixPath(name)
            for path in [*reversed(file.parents), file]:
                if path.parent == base != path or (recursive == "true" and base in path.parents):
                    entries[path] = file_entry(name, content) if path == file else folder_entry(str(path))
        if folder and not entries:
            return self.error("EntryNotFound", f"{folder} does not exist on {revision!r}")
        start = int(query.get("cursor", 0))
        end = start + self.hub.page_size
        link = f'<{self.hub.url}{url.path}?recursive={recursive}&cursor={end}>; rel="next"'
        self.json(list(entries.values())[start:end], {"Link": link} if end < len(entries) else {})

    def resolve(self, repo: str, revision: str, name: str) -> None:
        if not (commit := self.commit(revision)):
            return
        files = self.hub.commits[commit][repo]
        if name not in files:
            return self.error("EntryNotFound", "Entry not found")
        content = files[name]
        etag = git_oid(content) if name.endswith(PLAIN) else hashlib.sha256(content).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if not name.endswith(PLAIN):
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(content))}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not wanted:
            return self.send(200, content, headers)
        first, last = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
        if first > last:
            return self.send(416, b"", headers | {"Content-Range": f"bytes */{len(content)}"})
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        self.send(206, content[first : last + 1], headers)

    def commit(self, revision: str) -> str | None:
        """The commit of a revision; None after an error for one that is not known."""
        commit = self.hub.commit if revision == "main" else revision
        if commit not in self.hub.commits:
            self.error("RevisionNotFound", f"Invalid rev id: {unquote(revision)}")
            return None
        return commit

    def error(self, code: str, message: str) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message}
        self.json({"error": message}, headers, status=404)

    def json(self, data: Any, headers: dict[str, str] | None = None, status: int = 200) -> None:
        self.send(status, json.dumps(data).encode(), {"Content-Type": "application/json"} | (headers or {}))

    def send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.fault.corrupt:
            body = body[:-1] + bytes(byte ^ 1 for byte in body[-1:])
        if self.fault.stall:
            self.wfile.write(body[: len(body) // 2])
            self.hub.closing.wait(self.fault.stall)
            body = body[len(body) // 2 :]
        if self.fault.drop_after is None:
            self.wfile.write(body)
            return
        self.wfile.write(body[: self.fault.drop_after])
        self.close_connection = True
        if self.fault.reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()


def read_repos(repos: dict[str, Path]) -> Repos:
    return {
        repo: {
            file.relative_to(folder).as_posix(): file.read_bytes()
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        }
        for repo, folder in repos.items()
    }


def file_entry(name: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": name, "oid": git_oid(content), "size": len(content)}
    if not name.endswith(PLAIN):
        sha256 = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 134}
    return entry


def folder_entry(name: str) -> dict[str, Any]:
    return {"type": "directory", "path": name, "oid": git_oid(name.encode()), "size": 0}


def git_oid(content: bytes) -> str:
    """Git's name of a file: the sha1 of its content after a short header."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
