"""Kubeflow Trainer's status server, as far as its protocol goes: https, a token, and a JSON body that it knows."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from kubeflow_trainer_api.models.trainer_v1alpha1_update_train_job_status_request import (
    TrainerV1alpha1UpdateTrainJobStatusRequest,
)

from rallypoint.net.tls.making import make_certificates

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/ml/trainjobs/gpt/status"


class StatusServer(HTTPServer):
    """Keeps what was posted.

    Attributes:
        token: what must come with each status.
        taken: the statuses.
        answers: how each request was answered.
        env: what Trainer would put into a pod's environment.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        make_certificates(folder, hosts=["127.0.0.1"], days=1)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server" / "cert.pem", folder / "server" / "key.pem")
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.token = "the pod's token"
        self.taken: list[dict[str, Any]] = []
        self.answers: list[int] = []
        self.changed = threading.Condition()
        (folder / "token").write_text(self.token + "\n")
        self.env = {
            "KUBEFLOW_TRAINER_SERVER_URL": f"https://127.0.0.1:{self.server_port}{PATH}",
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(folder / "server" / "ca.pem"),
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(folder / "token"),
        }

    def wait_for(self, count: int) -> None:
        """Wait until so many requests were answered."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.answers) >= count, 30.0), self.answers

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: a client may not trust us."""


class _Handler(BaseHTTPRequestHandler):
    server: StatusServer
    timeout = 20.0

    def do_POST(self) -> None:
        status = self._status()
        self.send_response(status)
        self.end_headers()
        with self.server.changed:
            self.server.answers.append(status)
            self.server.changed.notify_all()

    def _status(self) -> int:
        if self.path != PATH:
            return 404
        if self.headers["Authorization"] != f"Bearer {self.server.token}":
            return 403
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        read = TrainerV1alpha1UpdateTrainJobStatusRequest.from_dict(body)
        assert read is not None
        assert read.to_dict()["trainerStatus"].keys() == body["trainerStatus"].keys()
        self.server.taken.append(body["trainerStatus"])
        return 200

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def status_server(folder: Path) -> Iterator[StatusServer]:
    """In the body, a status server whose files are in `folder`."""
    server = StatusServer(folder)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
