"""Where a coordinator may be is asked again at each attempt: addresses, a file, DNS."""

from __future__ import annotations

import builtins
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dns.flags
import dns.message
import dns.rdatatype
import dns.resolver
import dns.rrset
import pytest

from rallypoint.errors import LinkError, UsageError
from rallypoint.net.places import Whereabouts

PATIENCE_S = 60.0
NAME = "_job7._tcp.lab.test."


@pytest.mark.parametrize(("given", "found"), [
    ("a:4700", ["a:4700"]), ("a:4700,b:4700", ["a:4700", "b:4700"]), (" a:1 , [::1]:2 ,", ["a:1", "[::1]:2"]),
    ("a:1,b:1,a:1", ["a:1", "b:1"]),
])  # fmt: skip
def test_several_addresses_are_tried_in_their_order(given: str, found: list[str]) -> None:
    assert Whereabouts(given).now() == found
    assert str(Whereabouts(given)) == given


@pytest.mark.parametrize("given", ["", " ", ",", "file:"])
def test_no_place_at_all_is_a_usage_error(given: str) -> None:
    with pytest.raises(UsageError, match=r"names no place: write host:port, host:port,host:port, file:PATH or srv"):
        Whereabouts(given)


# ---- a file ----------------------------------------------------------------------------------------------------------


def test_a_file_is_read_again_each_time(tmp_path: Path) -> None:
    path = tmp_path / "coordinator"
    where = Whereabouts(f"file:{path}")
    with pytest.raises(LinkError, match="which cannot be read: No such file"):
        where.now()
    path.write_text("# the first one\n10.0.0.7:4700\n\n[fd00::7]:4700  # over IPv6\n")
    assert where.now() == ["10.0.0.7:4700", "[fd00::7]:4700"]
    path.write_text("10.0.0.8:4700")
    assert where.now() == ["10.0.0.8:4700"]


@pytest.mark.parametrize(("content", "why"), [
    (b"", "which has none"), (b"# soon\n", "which has none"), (b"\xff", "it is not text"), (b"soon", "is not an addr"),
])  # fmt: skip
def test_a_file_without_an_address_is_waited_for(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "coordinator"
    path.write_bytes(content)
    with pytest.raises(LinkError, match=why):
        Whereabouts(f"file:{path}").now()


def test_a_file_that_never_ends_costs_little(tmp_path: Path) -> None:
    assert len(Whereabouts(f"file:{_long(tmp_path)}").now()) == 64


def _long(folder: Path) -> Path:
    (path := folder / "long").write_text("".join(f"host{n}:1\n" for n in range(4096)))
    return path


# ---- DNS -------------------------------------------------------------------------------------------------------------


class NameServer:
    """Answers questions for SRV records over UDP with `records`; with none, that there is no such name."""

    def __init__(self) -> None:
        self.records: list[str] = []
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def close(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
            last.sendto(b"", ("127.0.0.1", self.port))
        self._thread.join(PATIENCE_S)
        self._socket.close()

    def _answer(self) -> None:
        while (asked := self._socket.recvfrom(4096))[0]:
            question = dns.message.from_wire(asked[0])
            answer = dns.message.make_response(question)
            if self.records:
                answer.answer.append(dns.rrset.from_text(question.question[0].name, 60, "IN", "SRV", *self.records))
            else:
                answer.set_rcode(dns.rcode.NXDOMAIN)
            self._socket.sendto(answer.to_wire(), asked[1])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServer]:
    server = NameServer()
    resolver = dns.resolver.Resolver(configure=False)
    resolver.nameservers, resolver.port = ["127.0.0.1"], server.port
    monkeypatch.setattr(dns.resolver, "get_default_resolver", lambda: resolver)
    yield server
    server.close()


def test_srv_records_count_by_priority_and_are_asked_for_again(server: NameServer) -> None:
    server.records = ["20 0 4701 c.lab.test.", "10 1 4700 b.lab.test.", "10 9 4700 a.lab.test."]
    where = Whereabouts(f"srv+dns://{NAME}")
    assert where.now() == ["a.lab.test:4700", "b.lab.test:4700", "c.lab.test:4701"]
    server.records = ["0 0 4700 d.lab.test."]
    assert where.now() == ["d.lab.test:4700"]


def test_a_name_that_is_not_there_yet_is_waited_for(server: NameServer) -> None:
    with pytest.raises(LinkError, match=r"SRV records of _job7._tcp.lab.test.: The DNS query name does not exist"):
        Whereabouts(f"srv+dns://{NAME}").now()


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    known = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("dns"):
            raise ImportError(name)
        return known(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r'needs the package dnspython: pip install .dnspython'):
        Whereabouts("srv+dns://lab.test")
    assert Whereabouts("a:1").now() == ["a:1"], "who does not ask for it does not need it"
