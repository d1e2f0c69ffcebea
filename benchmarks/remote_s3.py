"""The S3 store of `remote.py`: moto's server with the files of a folder, which counts the bytes that it sends.

``remote_s3.py FOLDER ADDRESS``: the files are in the bucket ``data``. ``/figures`` tells what was sent. The last line
of its output is its port.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

FOLDER, ADDRESS = Path(sys.argv[1]), sys.argv[2]


class Counted:
    """moto's application, and the bytes that its answers to GET have."""

    def __init__(self) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()
        self.figures = {"failed": 0, "sent": 0}

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/figures":
            data = json.dumps(self.figures).encode()
            start_response("200 OK", [("Content-Length", str(len(data)))])
            return [data]
        answer = self._moto(environ, start_response)
        return self._counted(answer) if environ["REQUEST_METHOD"] == "GET" else answer

    def _counted(self, answer: Iterable[bytes]) -> Iterator[bytes]:
        for part in answer:
            with self._lock:
                self.figures["sent"] += len(part)
            yield part


def upload(url: str) -> None:
    """Put the files into the bucket."""
    client = boto3.client(
        "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="test", aws_secret_access_key="test"
    )
    client.create_bucket(Bucket="data")
    for path in sorted(FOLDER.iterdir()):
        client.put_object(Bucket="data", Key=path.name, Body=path.read_bytes())


if __name__ == "__main__":
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = Counted()
    server = make_server(ADDRESS, 0, application, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    upload(f"http://{ADDRESS}:{server.server_port}")
    print(server.server_port, flush=True)
    thread.join()
