"""Members that send mutated frames beside their own: as a man in the middle does who has the keys of a connection."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
from collections.abc import Iterator
from typing import Any

from fuzz_frames import Corpus, Frame, Mutator
from fuzz_jobs import SERVERS

from rallypoint.net.channel import Channel
from rallypoint.net.frames import Header, Kind

ROLES = ("coordinator", "server", "worker")


class Faults(logging.Handler):
    """Everything that only a fault of our own writes: errors in the log, exceptions that end a thread."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(logging.Formatter().format(record))

    @contextlib.contextmanager
    def watching(self) -> Iterator[Faults]:
        """Collect faults during the body. Warnings are not written: there are thousands."""
        log, hook, level = logging.getLogger("rallypoint"), threading.excepthook, logging.getLogger("rallypoint").level
        log.addHandler(self)
        log.setLevel(logging.ERROR)
        propagates, log.propagate = log.propagate, False
        threading.excepthook = lambda args: self.found.append(f"thread {args.thread}: {args.exc_value!r}")
        try:
            yield self
        finally:
            log.removeHandler(self)
            log.setLevel(level)
            log.propagate = propagates
            threading.excepthook = hook


def receiver_of(channel: Channel) -> str:
    """The role of the other side."""
    if channel.name == "the coordinator":
        return "coordinator"
    return "server" if channel.name in SERVERS else "worker"


class Tap:
    """While active, sees each frame that a member of this process sends, and may add others behind it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Tap every channel of this process during the body."""
        honest = Channel.send

        def send(channel: Channel, header: Header, payload: memoryview | None = None, *rest: Any, **more: Any) -> None:
            frame = Frame(header, b"" if payload is None else bytes(payload))
            honest(channel, header, payload, *rest, **more)
            with self._lock:
                added = self.sent(channel, frame)
            for other in added:
                honest(channel, other.header, memoryview(other.payload), urgent=more.get("urgent", False))

        Channel.send = send  # type: ignore[method-assign]
        try:
            yield
        finally:
            Channel.send = honest  # type: ignore[method-assign]

    def sent(self, channel: Channel, frame: Frame) -> list[Frame]:
        """A frame has been sent: the frames to send after it."""
        raise NotImplementedError


class Recorder(Tap):
    """Keeps real frames of each kind, and everything that servers send to one worker, in order."""

    def __init__(self, worker: str = "") -> None:
        super().__init__()
        self.worker = worker
        self.corpus = Corpus()
        self.to_worker: list[Frame] = []

    def sent(self, channel: Channel, frame: Frame) -> list[Frame]:
        self.corpus.add(frame)
        if channel.name == self.worker and frame.header.kind is not Kind.CONTROL:
            self.to_worker.append(frame)
        return []


def _version(frame: Frame) -> tuple[int, int, int] | None:
    """The version that this frame tells of: shard, update, round."""
    header = frame.header
    return (header.shard, header.step, header.base) if header.kind in (Kind.VERSION, Kind.STATE) else None


class Possession(Tap):
    """While active, whoever sends a frame to a member of `role` sends mutated ones after it, about `rate` each.

    `gentle` is the share of those that could be real, so that the connection goes on. `through`: only over connections
    to the coordinator ("coordinator"), or only over all others ("servers"). It begins at once or later, and stops after
    a while: then the members go on alone.
    """

    def __init__(self, role: str, seed: int, *, rate: float = 2.0, gentle: float = 0.5, through: str = "") -> None:
        super().__init__()
        self.role, self.rate, self.gentle, self.through = role, rate, gentle, through
        self.rng = random.Random(seed)
        self.corpus = Corpus()
        self.mutator = Mutator(self.rng, self.corpus)
        self.thrown = 0
        self.spared = self.rng.choice([0, 0, self.rng.randrange(400)])  # true frames before the first mutated one
        if through == "coordinator":
            self.spared = self.rng.randrange(2, 8)  # a job has few of them
        self.most = self.rng.choice([30, 300, 3000])  # mutated frames
        self.last: list[str] = []
        self.promised = False  # a frame has told of a version that is not the one that was sent

    def sent(self, channel: Channel, frame: Frame) -> list[Frame]:
        self.corpus.add(frame)
        through = "coordinator" if frame.header.kind is Kind.CONTROL else "servers"
        attacked = receiver_of(channel) == self.role and self.through in ("", through)
        self.spared -= attacked
        if not attacked or self.spared >= 0 or channel._closing or self.thrown >= self.most:
            return []
        mutants = [self._mutant(frame) for _ in range(int(self.rng.expovariate(1 / self.rate)))]
        self.thrown += len(mutants)
        self.promised |= any(_version(mutant) not in (None, _version(frame)) for mutant in mutants)
        self.last = (self.last + [f"{channel.name} {m.header} {m.payload[:80]!r}" for m in mutants])[-20:]
        return mutants

    def _mutant(self, frame: Frame) -> Frame:
        """Mostly this very frame is mutated, else another one."""
        if self.rng.random() < self.gentle:
            return self.mutator.mutate(frame, gently=True)
        return self.mutator.mutate(frame if self.rng.random() < 0.6 else self.corpus.choose(self.rng))
