"""TLS between members, over real sockets: who gets in, what both sides say, and that nobody else notices."""

from __future__ import annotations

import contextlib
import logging
import random
import shutil
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from cryptography import x509
from test_gate import PATIENCE_S, TOKEN, Door, opened

from rallypoint.core.protocol import Hello
from rallypoint.errors import AccessDenied, CorruptFrame, LinkError, RallypointError, UnprovenPeer, UsageError
from rallypoint.net.certificates import CA, CERTIFICATE, KEY, ROLES, TlsFiles, make_certificates
from rallypoint.net.channel import SEALED_BYTES, Channel, Opener, Sealer
from rallypoint.net.frames import Header, Kind
from rallypoint.net.handshake import LinkKeys, check_exposure, introduce
from rallypoint.net.tcp import TcpConnection, TcpTransport, split_address
from rallypoint.net.tls import SECRET_BYTES, TlsConnection, TlsTransport
from rallypoint.net.transport import Connection, Transport
from support.beside import Beside, until
from support.transports import receive

__all__ = ["opened"]  # the fixture


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    return folder


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("foreign")
    make_certificates(folder)
    return folder


@pytest.fixture
def expired(certificates: Path, tmp_path: Path) -> Path:
    """The same CA; its certificates have expired."""
    shutil.copytree(certificates, tmp_path / "expired")
    make_certificates(tmp_path / "expired", days=-0.5)
    return tmp_path / "expired"


def tls(folder: Path, role: str) -> TlsTransport:
    return TlsTransport(TlsFiles(folder, role))


@pytest.fixture
def door(certificates: Path) -> Iterator[Door]:
    with contextlib.closing(Door(tls(certificates, "coordinator"), from_one=8)) as door:
        yield door


def dial(transport: Transport, address: str, opened: contextlib.ExitStack) -> Connection:
    connection = transport.connect(address, PATIENCE_S)
    connection.set_timeout(PATIENCE_S)
    opened.callback(connection.close)
    return connection


class Member:
    """Somebody who has been let in."""

    def __init__(self, transport: Transport, door: Door, opened: contextlib.ExitStack, role: str = "worker") -> None:
        self.connection = dial(transport, door.address, opened)
        hello = Hello(role, "w0", "here", to=("coordinator", "", 0))
        _, keys = introduce(self.connection, hello, TOKEN)
        self.connection.set_timeout(PATIENCE_S)
        macs = not self.connection.secured.binding
        self.sealer, self.opener = Sealer(keys, macs=macs), Opener(keys, "the gate", macs=macs)
        self.is_served()

    def is_served(self) -> None:
        self.connection.send(self.sealer.seal(Header(Kind.CREDIT), None))
        assert self.opener.open(memoryview(receive(self.connection, SEALED_BYTES))) == Header(Kind.CREDIT)


# ---- who gets in ----


@pytest.mark.parametrize("role", ["worker", "server", "observer", "aggregator"])
def test_a_member_with_a_certificate_of_its_role_gets_in(
    door: Door, certificates: Path, opened: contextlib.ExitStack, role: str
) -> None:
    member = Member(tls(certificates, role), door, opened, role)
    assert member.connection.secured.role == "coordinator"


def test_the_coordinators_own_console_may_observe(door: Door, certificates: Path, opened: contextlib.ExitStack) -> None:
    Member(tls(certificates, "coordinator"), door, opened, "observer")


def refused(
    door: Door, transport: Transport, opened: contextlib.ExitStack, caplog: pytest.LogCaptureFixture,
    role: str = "worker",
) -> tuple[RallypointError, str]:  # fmt: skip
    """What the dialer gets, and what the listener says. Both are one sentence."""
    caplog.set_level(logging.WARNING, logger="rallypoint")
    with pytest.raises(RallypointError) as failed:
        Member(transport, door, opened, role)
    until(lambda: bool(caplog.records))
    (line,) = (record.getMessage() for record in caplog.records)
    assert "\n" not in f"{failed.value}{line}"
    return failed.value, line


@pytest.mark.parametrize(("listens", "dials", "role", "kind", "here", "there"), [
    ("tls", "tls", "server", AccessDenied, "server w0 shows the certificate of a worker, which cannot be a server",
     "shows the certificate of a worker, which cannot be a server"),
    ("tls", "expired", "worker", UnprovenPeer,  # it may be renewed by the next attempt
     "does not accept this member's certificate: it has expired; `rallypoint token --tls", "has expired"),
    ("plain", "tls", "worker", UnprovenPeer, "speaks no TLS, and this member does",
     "speaks TLS, and this member without: give this one --tls"),
], ids=["another role", "expired", "a plain port"])  # fmt: skip
def test_who_is_refused_is_told_as_its_listener_is_and_nobody_else_notices(
    certificates: Path, expired: Path, opened: contextlib.ExitStack, caplog: pytest.LogCaptureFixture,
    listens: str, dials: str, role: str, kind: type[RallypointError], here: str, there: str,
) -> None:  # fmt: skip
    of = (lambda role: TcpTransport()) if listens == "plain" else partial(tls, certificates)
    door = opened.enter_context(contextlib.closing(Door(of("coordinator"), from_one=8)))
    beside = Member(of("worker"), door, opened)
    error, line = refused(door, tls(expired if dials == "expired" else certificates, "worker"), opened, caplog, role)
    assert isinstance(error, kind)
    assert here in str(error)
    assert there in line
    beside.is_served()


def test_a_listener_with_another_roles_certificate_is_not_believed(
    certificates: Path, opened: contextlib.ExitStack
) -> None:
    door = opened.enter_context(contextlib.closing(Door(tls(certificates, "worker"), from_one=8)))
    with pytest.raises(UnprovenPeer, match="shows the certificate of a worker, which cannot be a coordinator"):
        Member(tls(certificates, "worker"), door, opened)


def test_a_certificate_of_another_ca_is_told_to_both_sides(
    door: Door, certificates: Path, foreign: Path, opened: contextlib.ExitStack, caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:  # fmt: skip
    shutil.copytree(foreign / "worker", tmp_path / "own")
    shutil.copy(certificates / "worker" / CA, tmp_path / "own" / CA)  # so it believes the listener
    error, line = refused(door, tls(tmp_path / "own", "worker"), opened, caplog)
    assert isinstance(error, UnprovenPeer)
    assert "does not accept this member's certificate: it is of another CA" in str(error)
    assert "is not one of this job's CA" in line


@pytest.mark.parametrize("kind", ["foreign", "expired"])
def test_a_listener_whose_certificate_is_no_good_is_told_so(
    kind: str, certificates: Path, foreign: Path, expired: Path, opened: contextlib.ExitStack,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    shown = tls({"foreign": foreign, "expired": expired}[kind], "coordinator")
    door = opened.enter_context(contextlib.closing(Door(shown)))
    error, line = refused(door, tls(certificates, "worker"), opened, caplog)
    assert isinstance(error, UnprovenPeer)
    assert {"foreign": "is not one of this job's CA", "expired": "has expired"}[kind] in str(error)
    said = {"foreign": "it is of another CA", "expired": "it has expired"}[kind]
    assert f"does not accept this member's certificate: {said}" in line


def context_of(certificates: Path, opened: contextlib.ExitStack, door: Door) -> tuple[ssl.SSLContext, socket.socket]:
    """A client of openssl that believes the listener, and a connection to it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(certificates / "worker" / CA)
    sock = opened.enter_context(socket.create_connection(split_address(door.address), PATIENCE_S))
    return context, sock


def test_without_a_certificate_nobody_gets_in(
    door: Door, certificates: Path, opened: contextlib.ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    context, sock = context_of(certificates, opened, door)
    with context.wrap_socket(sock) as wrapped, pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
        wrapped.recv(1)
    until(lambda: "has no certificate, and this job needs one: give it --tls" in caplog.text)


def test_tls_before_1_3_is_refused(
    door: Door, certificates: Path, opened: contextlib.ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    context, sock = context_of(certificates, opened, door)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
        context.wrap_socket(sock)
    until(lambda: "unsupported protocol" in caplog.text)


# ---- with TLS and without ----


def test_a_plain_member_at_a_port_with_tls(
    door: Door, certificates: Path, opened: contextlib.ExitStack, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("rallypoint.net.tls._FIRST_WORD_S", 0.2)
    beside = Member(tls(certificates, "worker"), door, opened)
    error, line = refused(door, TcpTransport(), opened, caplog)
    assert isinstance(error, UnprovenPeer)
    assert "wants TLS, and this member comes without: give it --tls with its certificate" in str(error)
    assert "it may have come without TLS" in line
    for _ in range(3):
        with pytest.raises(UnprovenPeer):
            Member(TcpTransport(), door, opened)
    assert caplog.text.count("it may have come without TLS") == 1, "it tries again, and is told of once"
    beside.is_served()


def test_plain_bytes_at_a_port_with_tls(
    door: Door, opened: contextlib.ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    connection = dial(TcpTransport(), door.address, opened)
    connection.send(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(LinkError):
        receive(connection, 1)
    until(lambda: "came without TLS: give it --tls" in caplog.text)


# ---- those who say nothing, or little ----


def test_who_trickles_a_tls_handshake_keeps_nobody_out_and_is_let_go(
    certificates: Path, opened: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rallypoint.net.handshake.GREETING_TIMEOUT_S", 1.0)
    door = opened.enter_context(contextlib.closing(Door(tls(certificates, "coordinator"), from_one=8)))
    slow = [opened.enter_context(socket.create_connection(split_address(door.address))) for _ in range(6)]
    for number, sock in enumerate(slow):
        sock.settimeout(PATIENCE_S)
        if number % 2:
            sock.sendall(b"\x16\x03\x01\x02\x00")  # the header of a record of 512 bytes
    member = Member(tls(certificates, "worker"), door, opened)  # accepted meanwhile
    gone: list[int] = []
    for sock in slow[1::2]:
        with contextlib.suppress(OSError):
            for _ in range(400):
                sock.sendall(b"\x00")  # a byte now and then does not extend it
                if sock in _readable(sock):
                    break
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
        gone.append(sock.fileno())
    assert len(gone) == 3
    member.is_served()
    until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("from 127")][1:])


@pytest.mark.parametrize(
    "says",
    [
        lambda secured: None,
        lambda secured: secured.send(b"a short secret"),
        lambda secured: secured.unwrap(),
        lambda secured: secured.sendall(bytes(SECRET_BYTES + 1)),
        lambda secured: (secured.sendall(bytes(SECRET_BYTES)), socket.socket.sendall(secured, b"\xff" * 100)),
        lambda secured: (secured.sendall(bytes(SECRET_BYTES)), socket.socket.sendall(secured, b"\x64\0\0\0" * 40)),
    ],
    ids=["nothing", "a short secret", "the end", "a longer secret", "a record that is too long", "a forged record"],
)
def test_who_has_a_certificate_and_says_nonsense_is_let_go(
    says: Callable[[ssl.SSLSocket], object], certificates: Path, opened: contextlib.ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("rallypoint.net.handshake.GREETING_TIMEOUT_S", 0.5)
    door = opened.enter_context(contextlib.closing(Door(tls(certificates, "coordinator"), from_one=8)))
    member = Member(tls(certificates, "worker"), door, opened)
    sock = opened.enter_context(socket.create_connection(split_address(door.address), PATIENCE_S))
    secured = opened.enter_context(TlsFiles(certificates, "worker").loaded().dialing.wrap_socket(sock))
    with contextlib.suppress(OSError):
        says(secured)
    with contextlib.suppress(OSError):
        while socket.socket.recv(secured, 4096):
            pass
    until(lambda: not door._unproven._by_host)
    member.is_served()


def test_a_replayed_handshake_is_worth_nothing(
    door: Door, certificates: Path, opened: contextlib.ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    relay = Relay(door.address, None, opened)
    member = Member(tls(certificates, "worker"), at(relay, door), opened)
    said = bytes(relay.said)
    assert len(said) > 1000, "a ClientHello, a certificate, a secret, a Hello"
    sock = opened.enter_context(socket.create_connection(split_address(door.address), PATIENCE_S))
    sock.sendall(said)
    with contextlib.suppress(OSError):
        while sock.recv(4096):
            pass
    until(lambda: "TLS with 127.0.0.1" in caplog.text)
    until(lambda: len(door._open) == 1, "the member alone")  # the line is said before the connection is forgotten
    member.is_served()


def _readable(sock: socket.socket) -> list[socket.socket]:
    import select

    return select.select([sock], [], [], 0.01)[0]


def test_garbage_in_a_handshake_ends_only_that_connection(
    door: Door, certificates: Path, opened: contextlib.ExitStack
) -> None:
    member = Member(tls(certificates, "worker"), door, opened)
    rng = random.Random(5)
    for _ in range(30):
        connection = dial(TcpTransport(), door.address, opened)
        with contextlib.suppress(LinkError):
            connection.send(b"\x16\x03" + rng.randbytes(rng.randrange(600)))
            connection.close()
    member.is_served()


# ---- a man in the middle ----


class Relay:
    """Stands between a dialer and a gate. With a transport of its own it ends the dialer's TLS, and begins another."""

    def __init__(self, target: str, own: Transport | None, opened: contextlib.ExitStack, flips: int = -1) -> None:
        self.target, self.transport, self.flips = target, own or TcpTransport(), flips
        self.listener = self.transport.listen("127.0.0.1:0")
        self.address = self.listener.address
        self.ends: list[Connection] = []
        self.said = bytearray()  # by the dialer
        self.threads: list[threading.Thread] = []
        opened.callback(self.close)
        self._begin(self._accept)

    def _begin(self, function: object, *arguments: object) -> None:
        thread = threading.Thread(target=function, args=arguments)  # type: ignore[arg-type]
        self.threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(RallypointError):
            near, far = self.listener.accept(), self.transport.connect(self.target, PATIENCE_S)
            self.ends += [near, far]
            self._begin(self._pass, near, far, -1)
            self._pass(far, near, self.flips)

    def _pass(self, source: Connection, to: Connection, flips: int) -> None:
        passed = 0
        with contextlib.suppress(RallypointError):
            while True:
                data = bytearray(receive(source, 1))
                if source is self.ends[0]:
                    self.said += data
                data[0] ^= passed == flips
                to.send(bytes(data))
                passed += 1
        to.close()

    def close(self) -> None:
        self.listener.close()
        for end in self.ends:
            end.close()
        for thread in self.threads:
            thread.join(PATIENCE_S)


def at(relay: Relay, door: Door) -> Door:
    """The gate as somebody sees it who connects to the relay."""
    seen = object.__new__(Door)
    seen.address = relay.address
    return seen


class TwoFaced:
    """Listens with one role's certificate and connects with another's: who has stolen both keys."""

    secure = True

    def __init__(self, certificates: Path) -> None:
        self.listens, self.connects = tls(certificates, "coordinator"), tls(certificates, "worker")
        self.listen, self.connect = self.listens.listen, self.connects.connect
        self.private = self.listens.private


@pytest.mark.parametrize("same", [True, False], ids=["the very same", "others of the CA"])
def test_a_man_in_the_middle_is_found_out_whatever_certificates_he_has(
    door: Door, certificates: Path, opened: contextlib.ExitStack, caplog: pytest.LogCaptureFixture, tmp_path: Path,
    same: bool,
) -> None:  # fmt: skip
    shutil.copytree(certificates, tmp_path / "other")
    make_certificates(tmp_path / "other")
    relay = Relay(door.address, TwoFaced(certificates if same else tmp_path / "other"), opened)
    with pytest.raises(UnprovenPeer, match="without proving"):
        Member(tls(certificates, "worker"), at(relay, door), opened)
    until(lambda: "came with a wrong token" in caplog.text)


def test_a_bit_that_flips_on_the_way_is_a_corrupt_frame(certificates: Path, opened: contextlib.ExitStack) -> None:
    transport = tls(certificates, "server")
    listener = opened.enter_context(contextlib.closing(transport.listen("127.0.0.1:0")))
    relay = Relay(listener.address, None, opened, flips=5000)
    near = dial(transport, relay.address, opened)
    far = listener.accept()
    opened.callback(far.close)
    far.set_timeout(PATIENCE_S)
    with Beside(lambda: near.send(b"?")) as asking:
        receive(far, 1)
        asking.raise_if_failed()
    far.send(b"", memoryview(bytes(8000)))
    with pytest.raises(CorruptFrame, match="changed on the way"):
        receive(near, 8000)


# ---- certificates that are renewed ----


def copied(certificates: Path, to: Path) -> Path:
    shutil.copytree(certificates, to)
    return to


def serial(connection: Connection) -> int:
    """The serial number of the other side's certificate."""
    assert connection.secured
    assert isinstance(connection, TlsConnection)
    der = connection.certificate
    return x509.load_der_x509_certificate(der).serial_number


def test_renewed_certificates_count_for_new_connections_and_old_ones_go_on(
    certificates: Path, tmp_path: Path, opened: contextlib.ExitStack
) -> None:
    folder = copied(certificates, tmp_path / "own")
    gate, member = tls(folder, "coordinator"), tls(folder, "worker")
    door = opened.enter_context(contextlib.closing(Door(gate, from_one=8)))
    before = Member(member, door, opened)
    make_certificates(folder)
    after = Member(member, door, opened)
    assert serial(before.connection) != serial(after.connection)
    before.is_served()
    after.is_served()


@pytest.mark.parametrize("change", ["no key", "another key", "garbage", "another role"])
def test_files_that_are_half_renewed_are_told_of_and_the_old_ones_count(
    certificates: Path, tmp_path: Path, opened: contextlib.ExitStack, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    folder = copied(certificates, tmp_path / "own")
    transport = tls(folder, "worker")
    door = opened.enter_context(contextlib.closing(Door(tls(folder, "coordinator"), from_one=8)))
    key = folder / "worker" / KEY
    match change:
        case "no key":
            key.unlink()
        case "another key":
            shutil.copy(folder / "server" / KEY, key)
        case "garbage":
            (folder / "worker" / CERTIFICATE).write_text("half a fi")
        case "another role":
            for name in (CERTIFICATE, KEY):
                shutil.copy(folder / "server" / name, folder / "worker" / name)
    Member(transport, door, opened)
    assert "new connections use the certificate from before" in caplog.text


# ---- files ----


def test_each_role_has_its_own_folder_and_keys_are_private(certificates: Path) -> None:
    assert sorted(path.name for path in certificates.iterdir()) == sorted((*ROLES, "ca"))
    for role in ROLES:
        assert sorted(path.name for path in (certificates / role).iterdir()) == [CA, CERTIFICATE, KEY]
        assert (certificates / role / KEY).stat().st_mode & 0o777 == 0o600
    assert (certificates / "ca" / KEY).stat().st_mode & 0o777 == 0o600


def test_certificates_pass_the_strict_rules(tmp_path: Path) -> None:
    make_certificates(tmp_path, days=2)
    files = TlsFiles(tmp_path, "server").loaded()
    files.dialing.verify_flags |= ssl.VERIFY_X509_STRICT
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    here = files.dialing.wrap_bio(incoming, outgoing)
    there = files.listening.wrap_bio(outgoing, incoming, server_side=True)
    for _ in range(3):
        for side in (here, there):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    assert here.getpeercert()


def test_renewing_keeps_the_ca(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    before = {role: (tmp_path / role / CERTIFICATE).read_bytes() for role in ROLES}
    authority = (tmp_path / "ca" / CA).read_bytes()
    make_certificates(tmp_path)
    assert (tmp_path / "ca" / CA).read_bytes() == authority
    assert all((tmp_path / role / CERTIFICATE).read_bytes() != before[role] for role in ROLES)


def test_without_the_cas_key_nothing_is_renewed(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    (tmp_path / "ca" / KEY).unlink()
    with pytest.raises(UsageError, match=r"cannot sign: No such file or directory; bring its key\.pem back"):
        make_certificates(tmp_path)


def test_a_folder_without_certificates_is_told_with_the_way_to_make_them(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"ca\.pem cannot be read: No such file.*`rallypoint token --tls .*` makes"):
        TlsFiles(tmp_path, "worker")


def test_a_folder_of_another_role_is_told(certificates: Path) -> None:
    with pytest.raises(UsageError, match="is the certificate of a worker, and this is a server"):
        TlsFiles(certificates / "worker", "server")


def test_a_certificate_that_names_no_role_is_told(certificates: Path, tmp_path: Path) -> None:
    for name in (CERTIFICATE, CA):
        shutil.copy(certificates / "ca" / CA, tmp_path / name)
    shutil.copy(certificates / "ca" / KEY, tmp_path / KEY)
    with pytest.raises(UsageError, match="its common name must be one of coordinator, server"):
        TlsFiles(tmp_path, "server")


def test_an_encrypted_key_does_not_ask_the_terminal(certificates: Path, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    folder = copied(certificates / "worker", tmp_path / "own")
    key = serialization.load_pem_private_key((folder / KEY).read_bytes(), None)
    (folder / KEY).write_bytes(key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    ))  # fmt: skip
    with pytest.raises(UsageError, match="cannot be used"):
        TlsFiles(folder, "worker")


def test_tls_is_enough_to_be_reached_from_other_machines(certificates: Path) -> None:
    check_exposure(tls(certificates, "server"), "0.0.0.0:0", "")
    with pytest.raises(UsageError, match=r"set a job token of at least 16 characters .* or give each TLS"):
        check_exposure(TcpTransport(), "0.0.0.0:0", "short")


# ---- records ----


def test_a_payload_that_changes_under_tls_ends_the_link(certificates: Path, opened: contextlib.ExitStack) -> None:
    """With TLS frames have no MACs of their own: the records' tags must do."""
    transport = tls(certificates, "server")
    listener = opened.enter_context(contextlib.closing(transport.listen("127.0.0.1:0")))
    relay = Relay(listener.address, None, opened, flips=10_000)
    near = dial(transport, relay.address, opened)
    far = listener.accept()
    with Beside(lambda: near.secured) as shaking:
        assert far.secured.role == "server"
        shaking.raise_if_failed()
    keys = LinkKeys(b"a" * 32, b"b" * 32)
    receives, sends = Channel(near, "far", keys), Channel(far, "near", keys.other_side())
    opened.callback(sends.close)
    opened.callback(receives.close)
    sends.send(Header(Kind.VERSION, length=20_000), memoryview(bytes(20_000)))
    header = receives.receive_header()
    with pytest.raises(CorruptFrame, match="changed on the way"):
        receives.receive_bytes(header)


def test_another_version_inside_tls_is_told_to_both_sides(
    door: Door, certificates: Path, opened: contextlib.ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    context, sock = context_of(certificates, opened, door)
    context.load_cert_chain(certificates / "worker" / CERTIFICATE, certificates / "worker" / KEY)
    context.set_alpn_protocols(["rallypoint/10"])
    with context.wrap_socket(sock) as older, contextlib.suppress(OSError):
        assert older.recv(1) == b""
    until(lambda: "speaks another version of Rallypoint's TLS" in caplog.text)


def test_a_connection_that_failed_to_shake_hands_is_closed(certificates: Path, opened: contextlib.ExitStack) -> None:
    plain = opened.enter_context(contextlib.closing(TcpTransport().listen("127.0.0.1:0")))
    near = dial(tls(certificates, "worker"), plain.address, opened)
    far = plain.accept()
    opened.callback(far.close)
    far.send(b"RLPT, no TLS")
    assert isinstance(far, TcpConnection)
    for _ in range(2):
        with pytest.raises(LinkError):
            receive(near, 1)
