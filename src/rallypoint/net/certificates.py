"""The certificates of a job's members: a CA, the files of each role, and who a certificate names."""

from __future__ import annotations

import os
import secrets
import ssl
import threading
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rallypoint.errors import Explained, UsageError
from rallypoint.net.frames import PROTOCOL
from rallypoint.observe.lines import Sparingly
from rallypoint.own_files import opened

# ---- The files of TLS: a member's certificate and key, and the job's CA. They are read again when they have changed.

ROLES = ("coordinator", "server", "worker", "aggregator", "observer")
ALPN = f"rallypoint/{PROTOCOL}"  # RFC 7301: what is spoken inside TLS; both sides refuse another
CA, CERTIFICATE, KEY = "ca.pem", "cert.pem", "key.pem"


@dataclass(frozen=True, slots=True)
class LoadedFiles:
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

    def loaded(self) -> LoadedFiles:
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

    def _load(self) -> LoadedFiles:
        for path in (self.folder / name for name in (CA, CERTIFICATE, KEY)):
            todo = "; `rallypoint token --tls FOLDER` makes certificates"
            with Explained(UsageError, f"{path} cannot be read", todo):
                path.open("rb").close()
        try:
            dialing, listening = (self._context(side) for side in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER))
            certificate = x509.load_pem_x509_certificate((self.folder / CERTIFICATE).read_bytes())
            role = role_of(certificate)
        except (OSError, ValueError) as error:  # (an SSLError is an OSError)
            why = words_of(error) if isinstance(error, ssl.SSLError) else str(error)
            why = why.replace("key values mismatch", "the key is another certificate's")
            raise UsageError(f"the certificate and key in {self.folder} cannot be used: {why}") from None
        if role != self._role:
            raise UsageError(
                f"{self.folder / CERTIFICATE} is the certificate of a {role}, and this is a {self._role}: give --tls "
                f"the folder {self._role} of `rallypoint token --tls`, or the one above it"
            )
        return LoadedFiles(dialing, listening, certificate.public_bytes(serialization.Encoding.DER))

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


def role_of(certificate: x509.Certificate) -> str:
    """Return the role that a certificate names: its common name. ValueError if that is no role."""
    names = [name.value for name in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if len(names) != 1 or names[0] not in ROLES:
        raise ValueError(f"its common name must be one of {', '.join(ROLES)}")
    return str(names[0])


def words_of(error: ssl.SSLError) -> str:
    """Why TLS fails, in OpenSSL's words."""
    return (error.reason or str(error)).replace("_", " ").lower()


# ---- Makes the certificates of a job: a CA of its own, and one certificate for each role ----

CA_FOLDER = "ca"  # holds the CA's key: nobody needs it but who renews certificates
_CA_DAYS = 3650
_EARLIER = timedelta(days=1)  # clocks differ


def make_certificates(folder: Path, *, days: float = 365.0) -> datetime:
    """Make a CA, if `folder` has none, and a new certificate for each role. Returns until when they are valid.

        folder/ca/ca.pem, key.pem                        the CA's key stays here
        folder/ROLE/ca.pem, cert.pem, key.pem            what a member of this role needs

    Keys are P-256, files of keys are for this user only. Each file is replaced at once.
    UsageError if the CA cannot be used, or files not written.
    """
    with Explained(UsageError, f"certificates cannot be written to {folder}"):
        authority, key = _authority(folder / CA_FOLDER)
        now = datetime.now(UTC)
        if authority.not_valid_after_utc <= now:
            raise UsageError(f"the CA in {folder / CA_FOLDER} has expired: make certificates in a new folder")
        until = min(now + timedelta(days=days), authority.not_valid_after_utc)
        for role in ROLES:
            own = ec.generate_private_key(ec.SECP256R1())
            certificate = _certificate(role, own.public_key(), authority, key, until)
            (folder / role).mkdir(mode=0o700, parents=True, exist_ok=True)
            _write(folder / role / CA, _pem(authority))
            _write(folder / role / KEY, _pem_of_key(own))
            _write(folder / role / CERTIFICATE, _pem(certificate))
    return until


def _authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """The CA in this folder; a new one if there is none."""
    if (folder / CA).exists():
        cannot = f"the CA in {folder} cannot sign"
        with Explained(UsageError, cannot, f"; bring its {KEY} back", of=(OSError, ValueError, TypeError)):
            key = serialization.load_pem_private_key((folder / KEY).read_bytes(), None)
            certificate = x509.load_pem_x509_certificate((folder / CA).read_bytes())
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise UsageError(f"{cannot}: its {KEY} is another certificate's")
        return certificate, key
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    # No two CAs have the same name: else a certificate of another CA would look like a damaged one of this
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Rallypoint CA {secrets.token_hex(8)}")])
    now = datetime.now(UTC)
    certificate = (
        _builder(name, name, key.public_key(), now - _EARLIER, now + timedelta(days=_CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write(folder / KEY, _pem_of_key(key))
    _write(folder / CA, _pem(certificate))
    return certificate, key


def _certificate(
    role: str, public: ec.EllipticCurvePublicKey, authority: x509.Certificate, key: ec.EllipticCurvePrivateKey,
    until: datetime,
) -> x509.Certificate:  # fmt: skip
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, role)])
    both = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]  # members connect and listen
    identifier = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    issuer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)
    return (
        _builder(name, authority.subject, public, datetime.now(UTC) - _EARLIER, until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(both), critical=False)
        .add_extension(issuer, critical=False)
        .sign(key, hashes.SHA256())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, begin: datetime, until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates, key_cert_sign=signs_certificates, crl_sign=signs_certificates,
        content_commitment=False, key_encipherment=False, data_encipherment=False, key_agreement=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _pem_of_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, data: bytes) -> None:
    """Replace a file at once. Only this user may read it."""
    with opened(path.parent) as folder:
        folder.write(path.name, data, beside=f".{path.name}.{os.getpid()}")
