"""A directory behind the part of the API of S3 that the jobs use: HEAD and GET of objects, with ranges, lists, PUT
(whole, in parts, only if absent), and DELETE.

It serves code that uses pyarrow's file systems: tasks in other processes have only its URI.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

BUCKET = "stores"


class ObjectStore:
    """A running object store. `read`: bytes served."""

    def __init__(self, root: Path, port: int) -> None:
        self.root, self.port, self.read = root, port, 0
        self.lock = threading.Lock()
        self.parts: dict[str, dict[int, bytes]] = {}
        """Parts of incomplete uploads, by upload and number."""
        self.puts: list[str] = []
        """Keys, in the order in which they were written."""
        self.fails_after: int | None = None
        """Number of objects still accepted before writes fail; None for no limit."""

    def put(self, key: str, data: bytes) -> bool:
        """Create an object, or replace it."""
        with self.lock:
            if self.fails_after is not None and len(self.puts) >= self.fails_after:
                return False
            path = self.root / key
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f"{path.name}.{threading.get_ident()}")
            temporary.write_bytes(data)
            temporary.rename(path)
            self.puts.append(key)
            return True

    def uri(self, name: str) -> str:
        """Return the URI of a path in the directory, for pyarrow."""
        query = f"scheme=http&endpoint_override=127.0.0.1:{self.port}&region=us-east-1"
        return f"s3://key:secret@{BUCKET}/{name}?{query}"


@contextmanager
def serving(root: Path) -> Iterator[ObjectStore]:
    """Serve a directory on a port of its own."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    store = ObjectStore(root, server.server_port)
    server.store = store  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def serving_apart(root: Path) -> Iterator[ObjectStore]:
    """Serve a directory from a process of its own, for clients that keep Python's lock while they wait for an answer.
    The store's counters are in that process."""
    process = subprocess.Popen([sys.executable, "-m", __name__, str(root)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield ObjectStore(root, int(process.stdout.readline()))
    finally:
        process.terminate()
        process.communicate()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        data = self._content()
        key, query = self._asked()
        store: ObjectStore = self.server.store  # type: ignore[attr-defined]
        if not key:
            self._send(200, b"")  # A request for the bucket.
        elif "uploadId" in query:
            store.parts[query["uploadId"]][int(query["partNumber"])] = data
            self._send(200, b"", ETag='"x"')
        elif self.headers.get("If-None-Match") == "*" and (store.root / key).exists():
            self._send(412, _error("PreconditionFailed"))
        elif key.endswith("/"):
            self._send(200, b"", ETag='"x"')  # A directory's marker, as pyarrow makes them.
        else:
            self._send(*(200, b"") if store.put(key, data) else (403, _error("AccessDenied")), ETag='"x"')

    def do_POST(self) -> None:
        data = self._content()
        key, query = self._asked()
        store: ObjectStore = self.server.store  # type: ignore[attr-defined]
        if "uploads" in query:
            name = f"upload-{len(store.parts)}"
            store.parts[name] = {}
            inside = f"<Bucket>{BUCKET}</Bucket><Key>{escape(key)}</Key><UploadId>{name}</UploadId>"
            self._send(200, f"<InitiateMultipartUploadResult>{inside}</InitiateMultipartUploadResult>".encode())
        elif "uploadId" in query:
            parts = store.parts[query["uploadId"]]
            if store.put(key, b"".join(parts[number] for number in sorted(parts))):
                inside = f"<Bucket>{BUCKET}</Bucket><Key>{escape(key)}</Key><ETag>x</ETag>"
                self._send(200, f"<CompleteMultipartUploadResult>{inside}</CompleteMultipartUploadResult>".encode())
            else:
                self._send(403, _error("AccessDenied"))
        else:  # ?delete
            for name in re.findall(rb"<Key>(.*?)</Key>", data):
                (store.root / unescape(name.decode())).unlink(missing_ok=True)
            self._send(200, b"<DeleteResult></DeleteResult>")

    def do_DELETE(self) -> None:
        key, _ = self._asked()
        store: ObjectStore = self.server.store  # type: ignore[attr-defined]
        path = store.root / key
        if key and path.is_file():
            path.unlink()
        self._send(204, b"")

    def handle_expect_100(self) -> bool:
        super().handle_expect_100()
        self.wfile.flush()
        return True

    def _asked(self) -> tuple[str, dict[str, str]]:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        return unquote(parts.path).lstrip("/").partition("/")[2], query

    def _content(self) -> bytes:
        """Return the body of a request, also one that comes in chunks with checksums behind them."""
        data = b""
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            while size := int(self.rfile.readline().split(b";")[0], 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
        else:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "aws-chunked" in self.headers.get("Content-Encoding", ""):
            left, data = data, b""
            while size := int(left.partition(b"\r\n")[0].split(b";")[0], 16):
                left = left.partition(b"\r\n")[2]
                data, left = data + left[:size], left[size + 2 :]
        return data

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        store: ObjectStore = self.server.store  # type: ignore[attr-defined]
        path = store.root / key
        if bucket != BUCKET:
            self._send(404, _error("NoSuchBucket"))
        elif "list-type" in query:
            self._send(200, _list(store.root, query))
        elif not key:
            self._send(200, b"")
        elif key.endswith("/") or not path.is_file():
            self._send(404, _error("NoSuchKey"))
        else:
            self._send_file(store, path)

    def _send_file(self, store: ObjectStore, path: Path) -> None:
        size = path.stat().st_size
        first, last, code = 0, size - 1, 200
        asked = self.headers.get("Range")
        if asked:
            begin, _, end = asked.removeprefix("bytes=").partition("-")
            first, last, code = int(begin), min(int(end or size), size - 1), 206
            if first >= size:
                self._send(416, _error("InvalidRange"))
                return
        self.send_response(code)
        self.send_header("Content-Length", str(last - first + 1))
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.send_header("ETag", '"x"')
        self.send_header("Last-Modified", formatdate(path.stat().st_mtime, usegmt=True))
        self.end_headers()
        if self.command == "GET":
            with path.open("rb") as file:
                file.seek(first)
                self.wfile.write(file.read(last - first + 1))
            store.read += last - first + 1

    def _send(self, code: int, body: bytes, **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()


def _list(root: Path, query: dict[str, str]) -> bytes:
    """Return the objects whose names begin with a prefix; with a delimiter only those of one directory, and its
    subdirectories."""
    prefix = query.get("prefix", "")
    folder = root / prefix.rpartition("/")[0]
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    if not query.get("delimiter"):
        entries = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []
    objects, folders = [], []
    for path in entries:
        key = path.relative_to(root).as_posix() + ("/" if path.is_dir() else "")
        if key <= query.get("start-after", ""):
            continue
        if key.startswith(prefix) and path.is_dir():
            folders.append(f"<CommonPrefixes><Prefix>{escape(key)}</Prefix></CommonPrefixes>")
        elif key.startswith(prefix):
            size = path.stat().st_size
            time = "2026-01-01T00:00:00.000Z"
            objects.append(
                f"<Contents><Key>{escape(key)}</Key><LastModified>{time}</LastModified><ETag>x</ETag>"
                f"<Size>{size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            )
    return (
        f"<ListBucketResult><Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix>"
        f"<KeyCount>{len(objects) + len(folders)}</KeyCount><MaxKeys>1000000</MaxKeys>"
        f"<Delimiter>{quote(query.get('delimiter', ''))}</Delimiter><IsTruncated>false</IsTruncated>"
        f"{''.join(objects)}{''.join(folders)}</ListBucketResult>"
    ).encode()


if __name__ == "__main__":
    with serving(Path(sys.argv[1])) as served:
        print(served.port, flush=True)
        threading.Event().wait()
