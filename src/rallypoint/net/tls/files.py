"""The files of TLS: a member's certificate and key, and the job's CA. They are read again when they have changed."""

from __future__ import annotations

import ssl
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rallypoint.errors import UsageError
from rallypoint.net.frames import PROTOCOL
from rallypoint.observe.lines import Sparingly

ROLES = ("coordinator", "server", "worker", "aggregator", "observer")
ALPN = f"rallypoint/{PROTOCOL}"  # RFC 7301: what is spoken inside TLS; both sides refuse another
CA, CERTIFICATE, KEY = "ca.pem", "cert.pem", "key.pem"


@dataclass(frozen=True, slots=True)
class Loaded:
    """The files as they were at one moment.

    Attributes:
        dialing, listening: for the connections that this process makes, and accepts.
        certificate: this member's own one (DER).
    """

    dialing: ssl.SSLContext
    listening: ssl.SSLContext
    certificate: bytes


class TlsFiles:
    """The files of one role: `folder` holds them, or a sub-folder that is named like the role. Thread-safe.

    UsageError if they cannot be used, or are another role's. Later, files that cannot be used are told of, and the
    connections to come use those from before: a certificate is being renewed, file by file.
    """

    def __init__(self, folder: Path, role: str) -> None:
        own = folder / role
        self.folder = own if (own / CERTIFICATE).exists() else folder
        self._role = role
        self._lock = threading.Lock()
        self._lines = Sparingly(burst=1)
        self._seen = self._signature()
        self._loaded = self._load()

    def loaded(self) -> Loaded:
        """Return the files as they are now, or as they were when they could last be used."""
        with self._lock:
            if (now := self._signature()) != self._seen:
                try:
                    self._loaded = self._load()
                except UsageError as error:
                    self._lines.warn(f"{error}; new connections use the certificate from before")
                else:
                    self._seen = now
            return self._loaded

    def _signature(self) -> list[tuple[int, int, int]]:
        """What is different when a file has changed."""
        found = []
        for name in (CA, CERTIFICATE, KEY):
            try:
                stat = (self.folder / name).stat()
            except OSError:
                return []
            found.append((stat.st_ino, stat.st_mtime_ns, stat.st_size))
        return found

    def _load(self) -> Loaded:
        for name in (CA, CERTIFICATE, KEY):
            _check_readable(self.folder / name)
        try:
            dialing, listening = (self._context(side) for side in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER))
            pem = (self.folder / CERTIFICATE).read_text()
            begin = pem.index(ssl.PEM_HEADER)
            end = pem.index(ssl.PEM_FOOTER, begin) + len(ssl.PEM_FOOTER)
            certificate = ssl.PEM_cert_to_DER_cert(pem[begin:end])
            role = role_of(_described(self.folder / CERTIFICATE))
        except (OSError, ValueError) as error:  # (an SSLError is an OSError)
            raise UsageError(f"the certificate and key in {self.folder} cannot be used: {_why(error)}") from None
        if role != self._role:
            raise UsageError(
                f"{self.folder / CERTIFICATE} is the certificate of a {role}, and this is a {self._role}: give --tls "
                f"the folder {self._role} of `rallypoint token --tls`, or the one above it"
            )
        return Loaded(dialing, listening, certificate)

    def _context(self, side: int) -> ssl.SSLContext:
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # addresses come from the coordinator; the role counts, and the ticket
        context.verify_mode = ssl.CERT_REQUIRED
        context.set_alpn_protocols([ALPN])
        context.load_verify_locations(self.folder / CA)
        context.load_cert_chain(self.folder / CERTIFICATE, self.folder / KEY, password="")  # "": do not ask a terminal
        if side == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # nobody resumes a session
        return context


def role_of(certificate: dict[str, Any] | None) -> str:
    """Return the role that a certificate names: its common name. ValueError if that is no role."""
    subject = [pair for part in (certificate or {}).get("subject", ()) for pair in part]
    names = [value for key, value in subject if key == "commonName"]
    if len(names) != 1 or names[0] not in ROLES:
        raise ValueError(f"its common name must be one of {', '.join(ROLES)}")
    return str(names[0])


def _described(path: Path) -> dict[str, Any]:
    """The fields of the certificate in this file, as `getpeercert` gives those of the other side."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    subject = x509.load_pem_x509_certificate(path.read_bytes()).subject
    names = subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return {"subject": [[("commonName", name.value)] for name in names]}


def _check_readable(path: Path) -> None:
    try:
        with path.open("rb"):
            return
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}; `rallypoint token --tls FOLDER` makes certificates"
        ) from None


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or str(error)).replace("_", " ").lower()
        return "the key is another certificate's" if reason == "key values mismatch" else reason
    return str(error)
