"""The store of `remote.py`: a web server for the files of a folder, which counts the bytes that it sends.

``remote_store.py FOLDER ADDRESS EVERY``: of the requests for bytes each EVERY-th fails (0: none). ``/figures`` tells
what was sent. The last line of its output is its port.
"""

from __future__ import annotations

import http.server
import json
import re
import sys
import threading
from pathlib import Path

FOLDER, ADDRESS, EVERY = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_lock = threading.Lock()
_figures = {"requests": 0, "failed": 0, "sent": 0}


class Store(http.server.BaseHTTPRequestHandler):
    """Files, and ranges of them."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(self._path().stat().st_size, b"", 200)

    def do_GET(self) -> None:
        if self.path == "/figures":
            data = json.dumps(_figures).encode()
            self._answer(len(data), data, 200)
            return
        with _lock:
            _figures["requests"] += 1
            fails = EVERY > 0 and _figures["requests"] % EVERY == 0
            _figures["failed"] += fails
        if fails:
            self._answer(0, b"", 503)
            return
        path, asked = self._path(), _RANGE.fullmatch(self.headers.get("Range", ""))
        with path.open("rb") as opened:
            first, last = (int(asked[1]), int(asked[2])) if asked else (0, path.stat().st_size - 1)
            opened.seek(first)
            data = opened.read(last - first + 1)
        with _lock:
            _figures["sent"] += len(data)
        self._answer(len(data), data, 206 if asked else 200, first)

    def _path(self) -> Path:
        return FOLDER / Path(self.path).name

    def _answer(self, length: int, data: bytes, status: int, first: int = 0) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.send_header("Accept-Ranges", "bytes")
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{first + length - 1}/{self._path().stat().st_size}")
        self.send_header("ETag", '"1"')
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    """A thread for each connection."""

    daemon_threads = True
    request_queue_size = 128


if __name__ == "__main__":
    server = Server((ADDRESS, 0), Store)
    print(server.server_address[1], flush=True)
    server.serve_forever()
