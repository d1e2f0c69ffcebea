"""The contract of every transport as tests to inherit.

Test a transport of your own like this (pytest collects names that begin with ``Test``)::

    class TestMyTransport(TransportContract):
        @pytest.fixture
        def transport(self) -> Transport:
            return MyTransport()

        @pytest.fixture
        def address(self) -> str:
            return "anywhere:0"  # an address that gets a fresh listener every time
"""

from __future__ import annotations

import contextlib
import random
import re
import time
from collections.abc import Callable, Iterator

import pytest

from rallypoint.errors import AddressInUse, LinkError
from rallypoint.net.transport import Connection, Listener, Transport
from support.beside import PATIENCE_S, Beside, connected, receive, send_for_ever, trickle

__all__ = ["PATIENCE_S", "Beside", "TransportContract", "connected", "receive", "send_for_ever"]

_BULK = 8 << 20
_SENTENCE = re.compile(r"^\S[^\n]{10,}$")


class TransportContract:
    """What `rallypoint.net.transport` promises. Override the fixtures `transport` and `address`."""

    @pytest.fixture
    def transport(self) -> Transport:
        """The transport under test."""
        raise NotImplementedError("override the fixture `transport`")

    @pytest.fixture
    def address(self) -> str:
        """An address at which `listen` finds a free place every time."""
        raise NotImplementedError("override the fixture `address`")

    @pytest.fixture
    def listener(self, transport: Transport, address: str) -> Iterator[Listener]:
        """A listener, closed after the test."""
        listener = transport.listen(address)
        yield listener
        listener.close()

    @pytest.fixture
    def pair(self, transport: Transport, listener: Listener) -> Iterator[tuple[Connection, Connection]]:
        """Both ends of one connection: (who connected, who accepted)."""
        near, far = connected(transport, listener)
        yield near, far
        near.close()
        far.close()

    # ---- bytes ----

    def test_bytes_arrive_whole_and_in_order(self, pair: tuple[Connection, Connection]) -> None:
        near, far = pair
        rng = random.Random(1)
        pieces = [rng.randbytes(rng.randrange(1, 5000)) for _ in range(200)]

        def send() -> None:
            for piece in pieces:
                near.send(piece)

        with Beside(send):
            assert receive(far, sum(map(len, pieces))) == b"".join(pieces)

    def test_head_and_payload_arrive_as_one_stream(self, pair: tuple[Connection, Connection]) -> None:
        near, far = pair
        near.send(b"head", memoryview(b"payload"))
        near.send(b"next")
        near.send(b"empty", memoryview(b""))
        assert receive(far, 4 + 7 + 4 + 5) == b"headpayloadnextempty"

    def test_recv_into_fills_exactly_what_it_is_given(self, pair: tuple[Connection, Connection]) -> None:
        near, far = pair
        near.send(b"0123456789")
        room = bytearray(b"........")
        far.recv_into(memoryview(room)[2:5])
        assert room == b"..012..."
        assert receive(far, 7) == b"3456789"

    def test_recv_into_an_empty_view_waits_for_nothing(self, pair: tuple[Connection, Connection]) -> None:
        pair[1].recv_into(memoryview(bytearray()))

    def test_a_receive_waits_for_bytes_that_trickle_in(self, pair: tuple[Connection, Connection]) -> None:
        near, far = pair
        room = bytearray(3)
        with Beside(lambda: far.recv_into(memoryview(room))) as receiving:
            for byte in (b"a", b"b", b"c"):
                near.send(byte)
            receiving.raise_if_failed()
        assert room == b"abc"

    def test_eight_megabytes_arrive_while_the_reader_is_slow(self, pair: tuple[Connection, Connection]) -> None:
        near, far = pair
        payload = random.Random(2).randbytes(_BULK)
        with Beside(lambda: near.send(b"head", memoryview(payload))) as sending:
            assert receive(far, 4) == b"head"
            time.sleep(0.05)  # long enough to fill every buffer on the way
            got = b"".join(receive(far, 64 << 10) for _ in range(_BULK // (64 << 10)))
            sending.raise_if_failed()
        assert got == payload

    def test_megabytes_arrive_where_little_may_be_in_flight_and_that_changes(
        self, pair: tuple[Connection, Connection]
    ) -> None:
        near, far = pair
        payload = random.Random(3).randbytes(_BULK)
        for end in pair:
            end.limit_in_flight(16 << 10)
        with Beside(lambda: near.send(b"head", memoryview(payload))) as sending:
            assert receive(far, 4 + _BULK // 2) == b"head" + payload[: _BULK // 2]
            for limit in (0, 64 << 10, 32 << 10, 0):
                far.limit_in_flight(limit)
            assert receive(far, _BULK // 2) == payload[_BULK // 2 :]
            sending.raise_if_failed()

    def test_what_is_paced_arrives(self, pair: tuple[Connection, Connection]) -> None:
        near, far = pair
        for part in (0.0, 0.5):
            near.pace(64 << 20)
            near.share_port(part)
            with Beside(lambda: near.send(b"head", memoryview(bytes(1 << 20)))) as sending:
                assert receive(far, 4 + (1 << 20)) == b"head" + bytes(1 << 20)
                sending.raise_if_failed()

    def test_the_payload_may_be_changed_once_send_has_returned(self, pair: tuple[Connection, Connection]) -> None:
        near, far = pair
        payload = bytearray(b"x" * 1000)
        near.send(b"", memoryview(payload))
        payload[:] = b"y" * 1000
        assert receive(far, 1000) == b"x" * 1000

    def test_bulk_flows_both_ways_at_once_without_deadlock(self, pair: tuple[Connection, Connection]) -> None:
        near, far = pair
        there, back = random.Random(3).randbytes(_BULK), random.Random(4).randbytes(_BULK)
        came: dict[str, bytes] = {}
        with (
            Beside(lambda: near.send(b"", memoryview(there))) as up,
            Beside(lambda: far.send(b"", memoryview(back))) as down,
            Beside(lambda: came.update(back=receive(near, _BULK))) as receiving,
        ):
            came["there"] = receive(far, _BULK)
            for thread in (up, down, receiving):
                thread.raise_if_failed()
        assert came == {"there": there, "back": back}

    def test_connections_of_one_listener_are_apart(self, transport: Transport, listener: Listener) -> None:
        with contextlib.ExitStack() as stack:
            pairs = []
            for _ in range(3):
                near, far = connected(transport, listener)
                stack.callback(near.close)
                stack.callback(far.close)
                pairs.append((near, far))
            for number, (near, _) in enumerate(pairs):
                near.send(bytes([number]) * 10)
            for number, (_, far) in reversed(list(enumerate(pairs))):
                assert receive(far, 10) == bytes([number]) * 10

    def test_both_sides_know_the_same_of_their_connection_and_not_of_another(
        self, pair: tuple[Connection, Connection], transport: Transport, listener: Listener
    ) -> None:
        other = connected(transport, listener)
        near, far = (end.secured for end in pair)
        assert near.binding == far.binding
        assert bool(near.binding) == bool(near.role) == bool(far.role) == transport.secure
        assert not transport.secure or other[0].secured.binding != near.binding
        for end in other:
            end.close()

    def test_a_peer_has_a_name(self, pair: tuple[Connection, Connection]) -> None:
        assert all(end.peer for end in pair)

    # ---- the end of a stream ----

    @pytest.mark.parametrize("closes", [0, 1], ids=["near", "far"])
    @pytest.mark.parametrize("call", [lambda near: receive(near, 1), send_for_ever], ids=["receiver", "sender"])
    def test_a_close_at_either_end_wakes_who_is_blocked(
        self, pair: tuple[Connection, Connection], call: Callable[[Connection], object], closes: int
    ) -> None:
        with Beside(lambda: call(pair[0])) as blocked:
            time.sleep(0.1)  # most likely blocked by now, or the buffers are full; the promise holds either way
            pair[closes].close()
            assert isinstance(blocked.outcome(), LinkError)

    def test_what_was_sent_before_a_close_can_still_be_read(self, pair: tuple[Connection, Connection]) -> None:
        near, far = pair
        near.send(b"last ", memoryview(b"words"))
        near.close()
        assert receive(far, 10) == b"last words"
        with pytest.raises(LinkError, match=_SENTENCE):
            receive(far, 1)

    def test_what_was_sent_before_it_was_finished_arrives_and_receiving_goes_on(
        self, pair: tuple[Connection, Connection]
    ) -> None:
        near, far = pair
        for number in range(100):
            near.send(bytes([number]))
        near.finish()
        far.send(b"answer")
        assert receive(far, 100) == bytes(range(100))
        with pytest.raises(LinkError, match=_SENTENCE):
            receive(far, 1)
        assert receive(near, 6) == b"answer"
        near.close()
        near.finish()  # does nothing

    def test_a_stream_that_ends_inside_a_receive_is_an_error(self, pair: tuple[Connection, Connection]) -> None:
        near, far = pair
        near.send(b"half")
        near.close()
        with pytest.raises(LinkError):
            receive(far, 8)

    def test_a_closed_connection_neither_sends_nor_receives(self, pair: tuple[Connection, Connection]) -> None:
        near, far = pair
        far.send(b"unread")
        near.close()
        with pytest.raises(LinkError):
            near.send(b"x", memoryview(b"y"))
        with pytest.raises(LinkError):
            receive(near, 1)

    def test_what_is_closed_may_be_closed_again_and_given_limits(
        self, pair: tuple[Connection, Connection], listener: Listener
    ) -> None:
        for end in (*pair, *pair, listener, listener):
            end.close()
        pair[0].set_timeout(1.0)
        pair[0].limit_in_flight(16 << 10)

    # ---- timeouts ----

    @pytest.mark.parametrize("call", [lambda near: receive(near, 1), send_for_ever], ids=["receive", "send"])
    def test_a_call_past_the_timeout_is_an_error(
        self, pair: tuple[Connection, Connection], call: Callable[[Connection], object]
    ) -> None:
        pair[0].set_timeout(0.05)
        with pytest.raises(LinkError, match=_SENTENCE):
            call(pair[0])

    def test_progress_starts_a_receives_timeout_anew(self, pair: tuple[Connection, Connection]) -> None:
        near, far = pair
        near.set_timeout(0.5)
        with Beside(lambda: receive(near, 8)) as receiving:
            for _ in range(8):
                time.sleep(0.1)  # 0.8 s in all
                far.send(b"x")
            receiving.raise_if_failed()

    def test_progress_starts_a_sends_timeout_anew(self, pair: tuple[Connection, Connection]) -> None:
        near, far = pair
        near.set_timeout(0.5)

        def send() -> None:
            try:
                near.send(b"", memoryview(bytes(4 * _BULK)))
            finally:
                near.close()

        with Beside(send) as sending:
            for _ in range(16):
                time.sleep(0.1)  # 1.6 s in all, far more than the timeout even with every buffer on the way full
                receive(far, 4 * _BULK // 16)
            sending.raise_if_failed()

    @pytest.mark.parametrize("name", ["set_timeout", "set_deadline"])
    def test_a_timeout_and_a_deadline_can_be_taken_away(self, pair: tuple[Connection, Connection], name: str) -> None:
        near, far = pair
        for seconds in (0.01, None):
            getattr(near, name)(seconds)
        with Beside(lambda: receive(near, 1)) as receiving:
            time.sleep(0.05)
            far.send(b"x")
            receiving.raise_if_failed()

    # ---- deadlines ----

    def test_a_deadline_ends_a_receive_that_trickles(self, pair: tuple[Connection, Connection]) -> None:
        near, far = pair
        near.set_deadline(0.3)
        with Beside(lambda: receive(near, 1 << 20)) as receiving:
            trickle(lambda: far.send(b"x"), receiving)
            assert isinstance(receiving.outcome(), LinkError)

    def test_a_deadline_ends_a_send_that_is_read_slowly(self, pair: tuple[Connection, Connection]) -> None:
        near, far = pair
        near.set_deadline(0.3)
        with Beside(lambda: send_for_ever(near)) as sending:
            trickle(lambda: receive(far, 1), sending)
            assert isinstance(sending.outcome(), LinkError)

    def test_a_deadline_is_for_sending_and_receiving_together(self, pair: tuple[Connection, Connection]) -> None:
        near, far = pair
        near.set_deadline(0.3)

        def talk() -> None:
            while True:
                near.send(b"question")
                receive(near, 1)

        with Beside(talk) as talking:
            trickle(lambda: far.send(b"y"), talking)
            assert isinstance(talking.outcome(), LinkError)

    # ---- addresses ----

    def test_nobody_there_is_an_error_in_time(self, transport: Transport, address: str) -> None:
        listener = transport.listen(address)
        listener.close()
        start = time.monotonic()
        with pytest.raises(LinkError, match=re.escape(listener.address)):
            transport.connect(listener.address, 1.0)
        assert time.monotonic() - start < 5.0

    def test_an_address_in_use_is_refused_in_one_sentence(self, transport: Transport, listener: Listener) -> None:
        with pytest.raises(AddressInUse, match=_SENTENCE) as refused:
            transport.listen(listener.address)
        assert "in use" in str(refused.value)

    def test_an_address_is_free_again_after_close(self, transport: Transport, address: str) -> None:
        first = transport.listen(address)
        first.close()
        again = transport.listen(first.address)
        assert again.address == first.address
        again.close()

    def test_free_addresses_differ(self, transport: Transport, address: str) -> None:
        listeners = [transport.listen(address) for _ in range(3)]
        for listener in listeners:
            listener.close()
        assert len({listener.address for listener in listeners}) == 3

    def test_closing_wakes_a_blocked_accept(self, listener: Listener) -> None:
        with Beside(listener.accept) as accepting:
            time.sleep(0.05)
            listener.close()
            assert isinstance(accepting.outcome(), LinkError)

    def test_a_closed_listener_accepts_nobody(self, listener: Listener) -> None:
        listener.close()
        with pytest.raises(LinkError, match=_SENTENCE):
            listener.accept()

    def test_connections_outlive_their_listener(self, pair: tuple[Connection, Connection], listener: Listener) -> None:
        listener.close()
        pair[0].send(b"still here")
        assert receive(pair[1], 10) == b"still here"

    def test_the_address_is_private(self, transport: Transport, listener: Listener) -> None:
        assert transport.private(listener.address)
