"""``rallypoint doctor``: is this machine, is this cluster fit for a job? Facts, what they mean, what to do.

A probe on each machine tells its facts, which change nothing, and measures the links. It greets as the coordinator of a
job of its own does, and takes only doctors (observers of this name) that prove that they know the token.
Nobody else is served, and every answer is bounded: in time, and in bytes.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rallypoint.core.protocol import Hello, Welcome
from rallypoint.core.typed import Count, Name, Seconds, counted, printable
from rallypoint.errors import AccessDenied, LinkError, ProtocolError, RallypointError, UnprovenPeer
from rallypoint.launch.access import Access
from rallypoint.net.channel import Channel
from rallypoint.net.frames import PROTOCOL, Header, Kind
from rallypoint.net.gate import Gate
from rallypoint.net.handshake import COORDINATOR, Identity, introduce
from rallypoint.net.member import CoordinatorLink, Handlers
from rallypoint.observe.recording import version
from rallypoint.observe.usage import most_files, usable_cores
from rallypoint.store.files import Files

_GPU_S = 20.0  # a driver that does not answer is a finding, not a reason to wait
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class GpuFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A GPU as its driver tells of it. `memory` is in bytes."""

    name: Name
    driver: Name
    memory: Count


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """What is true of one machine: a probe's answer to `AskFacts`."""

    host: Name  # its name
    rallypoint: Name  # the version of this package
    protocol: Count  # the number that both sides of a link must have
    python: Name  # its version
    torch: Name  # its version, "" if there is none
    processor: Name  # its model
    capability: Name  # which instructions torch uses ("AVX2", "AVX512", ...)
    cores: Count  # those that this process may use
    memory: Count  # bytes
    files: Count  # how many a process may open
    threads: dict[Name, Name]  # the environment variables that set a number of threads
    cubic: bool  # is the congestion control there that links ask for?
    # Unix time in seconds when it was asked; in a table of machines, how far it is ahead of the first one's
    clock: float
    gpus: Annotated[tuple[GpuFacts, ...], msgspec.Meta(max_length=256)] = ()  # what `nvidia-smi` lists
    gpu_trouble: Name = ""  # why it could not
    cuda: Name = ""  # what torch says: the version of CUDA that it was built for, "" for none
    gpus_seen: Count = 0  # how many GPUs torch can use
    # The digest of a small computation, in fp32 and bf16: machines with another one compute other bytes. On the first
    # GPU that torch can use, else on the processor, with one thread; "" without torch.
    kernels: Name = ""


def collect() -> MachineFacts:
    """Collect the facts about this machine. It imports torch, which takes seconds."""
    torch, capability, cuda, seen = _torch()
    gpus, trouble = _gpus()
    return MachineFacts(
        host=socket.gethostname(), rallypoint=version(), protocol=PROTOCOL,
        python=platform.python_version(), torch=torch, processor=_processor(), capability=capability,
        cores=usable_cores(), memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), files=most_files(),
        threads={name: os.environ[name] for name in _THREADS if name in os.environ}, cubic=_cubic(),
        clock=time.time(), gpus=gpus, gpu_trouble=trouble, cuda=cuda, gpus_seen=seen,
        kernels=_kernels(seen) if capability else "",
    )  # fmt: skip


def free_bytes(folder: Path) -> int:
    """Return the bytes that this process may still write to the file system where `folder` is, or will be."""
    there = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    return shutil.disk_usage(there).free


def _torch() -> tuple[str, str, str, int]:
    """What torch says of itself, of the processor, of CUDA, and how many GPUs it can use."""
    try:
        import torch
    except ImportError:
        return "", "", "", 0
    capability, cuda = torch.backends.cpu.get_cpu_capability(), torch.version.cuda or ""
    return str(torch.__version__), capability, cuda, torch.cuda.device_count()


def _kernels(gpus: int) -> str:
    import torch

    from rallypoint.worker.kernels import kernels_of

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a job says how many there are: machines are not unlike because of their cores
    try:
        return kernels_of("cuda" if gpus else "cpu").hex()
    finally:
        torch.set_num_threads(threads)


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cubic() -> bool:
    try:
        return "cubic" in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    except OSError:
        return False


def _gpus() -> tuple[tuple[GpuFacts, ...], str]:
    """What the driver lists, and why it could not."""
    if shutil.which("nvidia-smi") is None:
        return (), ""
    argv = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_GPU_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), f"nvidia-smi does not answer: {type(error).__name__}"
    if done.returncode:
        return (), " ".join((done.stdout or done.stderr).split())[:120] or f"nvidia-smi ended with {done.returncode}"
    return gpus_of(done.stdout.splitlines()), ""


def gpus_of(lines: Iterable[str]) -> tuple[GpuFacts, ...]:
    """Return the GPUs that nvidia-smi has listed: ``NVIDIA H200, 560.35, 143771`` (MiB)."""
    words = [[word.strip() for word in line.split(",")] for line in lines if line.count(",") == 2]
    return tuple(GpuFacts(name, driver, int(mib) << 20 if mib.isdigit() else 0) for name, driver, mib in words)


FEWEST_FILES = 1024
_CLOCKS_S = 60.0  # nothing compares clocks; but logs of machines that differ more cannot be read side by side
_SLOW = 0.5  # of the median throughput: such a link is what everybody waits for
_TIGHT = 0.25  # of the heartbeat: a longer round trip makes false alarms likely
LITTLE_SPACE = 10 << 30


class Level(enum.IntEnum):
    """How bad a finding is: a BAD one will break a job, or its bytes; a WARNING may cost time."""

    FINE = 0
    WARNING = 1
    BAD = 2


@dataclass(frozen=True, slots=True)
class Advice:
    """One sentence, and what to do about it ("" if nothing)."""

    level: Level
    text: str
    todo: str = ""


def of_machine(facts: MachineFacts) -> list[Advice]:
    """What the facts about one machine mean."""
    found = []
    if not facts.torch:
        found.append(Advice(Level.BAD, f"{facts.host} has no torch", "pip install torch (2.9 or newer)"))
    if facts.files < FEWEST_FILES:
        found.append(Advice(
            Level.WARNING, f"{facts.host}: a process may open {facts.files} files",
            f"`ulimit -n {4 * FEWEST_FILES}` before roles start: each link needs one",
        ))  # fmt: skip
    if not facts.cubic:
        found.append(Advice(
            Level.WARNING, f"{facts.host} has no TCP congestion control named cubic, which links ask for",
            "`modprobe tcp_cubic`; without it links use the system's own, and share a line less evenly",
        ))  # fmt: skip
    if facts.gpu_trouble:
        found.append(Advice(Level.BAD, f"{facts.host}: {facts.gpu_trouble}", "mend the driver, or train on the CPU"))
    if facts.gpus and facts.gpus_seen < len(facts.gpus):
        found.append(_unused(facts))
    return found


def _unused(facts: MachineFacts) -> Advice:
    listed = f"{facts.host}: the driver lists {counted(len(facts.gpus), 'GPU')}, torch can use {facts.gpus_seen}"
    if not facts.cuda:
        return Advice(Level.WARNING, listed, "this torch is a CPU build: install one for CUDA to train on them")
    driver = facts.gpus[0].driver
    return Advice(Level.WARNING, listed, f"CUDA_VISIBLE_DEVICES, or a driver ({driver}) too old for CUDA {facts.cuda}")


_SAME: tuple[tuple[str, Level, Callable[[MachineFacts], str], str], ...] = (
    ("protocol numbers", Level.BAD, lambda facts: str(facts.protocol), "install the same rallypoint everywhere"),
    ("versions of rallypoint", Level.WARNING, lambda facts: facts.rallypoint, "install the same one everywhere"),
    ("versions of torch", Level.WARNING, lambda facts: facts.torch.partition("+")[0],
     "the same one everywhere: another may add up in another order, and then bytes depend on who computes what"),
    ("processor capabilities", Level.WARNING, lambda facts: facts.capability,
     "ATEN_CPU_CAPABILITY=avx2 for every process makes torch's kernels the same; BLAS may still differ by processor, "
     "so the bytes are promised only among like machines"),
    ("numbers of threads", Level.WARNING, lambda facts: facts.threads.get("OMP_NUM_THREADS", "not set"),
     "a job decides how many it computes with (--threads); alone `python train.py` takes OMP_NUM_THREADS or all"),
    ("kinds of GPU", Level.WARNING, lambda facts: ", ".join(sorted({gpu.name for gpu in facts.gpus})) or "none",
     "a replica's bytes depend on the kind of device that computes it: all of one kind for the same bytes"),
    ("results of the probe computation", Level.WARNING, lambda facts: facts.kernels[:12],
     "these machines compute other bytes from the same numbers: their workers cannot audit each other, and a "
     "replica's bytes depend on who computes it"),
)  # fmt: skip


def of_cluster(machines: Sequence[MachineFacts]) -> list[Advice]:
    """What differs among machines, and matters."""
    found = []
    for what, level, value, todo in _SAME:
        hosts = Counter(value(facts) for facts in machines)
        if len(hosts) > 1:
            groups = ", ".join(f"{name or 'none'} ({counted(count, 'machine')})" for name, count in hosts.most_common())
            found.append(Advice(level, f"different {what}: {groups}", todo))
    clocks = [facts.clock for facts in machines]
    if clocks and max(clocks) - min(clocks) > _CLOCKS_S:
        apart = f"the machines' clocks are {max(clocks) - min(clocks):.0f} s apart"
        todo = "no role compares clocks, but logs do, and TLS certificates have dates: set them by NTP"
        found.append(Advice(Level.WARNING, apart, todo))
    return found


def of_links(links: Sequence[MeasuredLink], heartbeat: float) -> list[Advice]:
    """What the measured links mean for a job whose members may be silent for `heartbeat` seconds."""
    found = []
    rates = [link.rate for link in links if not link.trouble]
    median = statistics.median(rates) if rates else 0.0
    for link in links:
        name = f"{link.source} -> {link.target}"
        if link.trouble:
            found.append(Advice(Level.BAD, f"{name}: {link.trouble}", "open the port, or --advertise another address"))
            continue
        if link.round_trip > _TIGHT * heartbeat:
            found.append(Advice(
                Level.WARNING, f"{name}: a round trip takes {link.round_trip:.1f} s",
                f"a --heartbeat of {heartbeat:g} s gives members up too easily there: use a longer one",
            ))  # fmt: skip
        if len(rates) > 2 and link.rate < _SLOW * median:
            found.append(Advice(
                Level.WARNING, f"{name}: {bits(link.rate)}, where the median link has {bits(median)}",
                "a synchronous step waits for its slowest link: mend it, or see docs/choosing.md for what waits less",
            ))  # fmt: skip
    return found


def of_space(where: str, free: int, rate: str) -> list[Advice]:
    """What the free bytes for snapshots mean; `rate` is a phrase, how fast one can write there."""
    if free >= LITTLE_SPACE:
        return [Advice(Level.FINE, f"{where} has {free / 1e9:.0f} GB free for snapshots, written {rate}")]
    return [Advice(
        Level.WARNING, f"{where} has {free / 1e9:.1f} GB free for snapshots, written {rate}",
        "a snapshot takes three times the model in fp32 (with Adam), and --keep-last of them stay",
    )]  # fmt: skip


def bits(rate: float) -> str:
    """A rate in bytes a second as people name a link's: "941 Mbit/s"."""
    return f"{8e-9 * rate:.1f} Gbit/s" if rate >= 1.25e9 else f"{8e-6 * rate:.0f} Mbit/s"


NAME = "doctor"
_ROUNDS = 20  # round trips; their median counts
_PIECE = bytes(1 << 20)
_SENDS_S = 1.0  # so long a throughput is measured
_ANSWER_S = 30.0  # a probe that says nothing for longer is gone
_CONNECT_S = 5.0
_LONGEST = 64 << 10  # bytes of a question or an answer


class _Word(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """What doctors and probes say to each other, in control frames."""


_T = TypeVar("_T")


class AskFacts(_Word, frozen=True):
    """Tell your machine's facts."""


class AskLink(_Word, frozen=True):
    """Measure the link from your machine to the probe at this address."""

    address: Name


class MeasuredLink(_Word, frozen=True):
    """What was measured from one machine to another (a probe leaves out which): the round trip in seconds and the rate
    in bytes a second; `trouble` says why there are none."""

    source: Name = ""
    target: Name = ""
    round_trip: Seconds = 0.0
    rate: Seconds = 0.0
    trouble: Name = ""


class Ping(_Word, frozen=True):
    """Send this back."""


class AskArrived(_Word, frozen=True):
    """How many bytes of tensor frames have come, and in how many seconds?"""


class BytesArrived(_Word, frozen=True):
    """Bytes, and the seconds from the first to the last."""

    nbytes: Count
    seconds: Seconds


_decoder = msgspec.msgpack.Decoder(AskFacts | MachineFacts | AskLink | MeasuredLink | Ping | AskArrived | BytesArrived)


class Probe:
    """Answers doctors at `bind` until `close`. UsageError if others can reach `bind` and the token is too short."""

    def __init__(self, access: Access, bind: str, facts: Callable[[], MachineFacts]) -> None:
        self._access, self._facts = access, facts
        self._measuring = threading.Lock()  # two measurements at once would halve each other's figures
        me = Identity(COORDINATOR[0], COORDINATOR[1], access.token)
        self._gate = Gate(access.transport, bind, me, _admit, self._serve)
        self.address = self._gate.address

    def close(self) -> None:
        """Stop. Returns when all threads have ended."""
        self._gate.close()

    def _serve(self, channel: Channel, hello: Hello) -> None:
        channel.connection.set_timeout(_ANSWER_S)
        nbytes, first, last = 0, 0.0, 0.0
        while True:
            header = channel.receive_header()
            if header.kind is Kind.STATE:
                if header.length > len(_PIECE):
                    raise ProtocolError(f"a piece of {header.length} bytes: at most {len(_PIECE)} are asked for")
                first = first or time.monotonic()
                nbytes += len(channel.receive_bytes(header))
                last = time.monotonic()
                continue
            match _word_of(channel, header):
                case AskFacts():
                    _say(channel, msgspec.structs.replace(self._facts(), clock=time.time()))
                case AskLink(address=address):
                    with self._measuring:
                        _say(channel, _measured(self._access, address))
                case Ping():
                    _say(channel, Ping())
                case AskArrived():
                    _say(channel, BytesArrived(nbytes, last - first))
                    nbytes, first, last = 0, 0.0, 0.0
                case other:
                    raise ProtocolError(f"a doctor does not say {type(other).__name__}")


class ProbeLink:
    """A doctor's link to the probe at `address`; a context manager. LinkError or AccessDenied if there is none."""

    def __init__(self, access: Access, address: str) -> None:
        self.address = address
        connection = access.transport.connect(address, _CONNECT_S)
        try:
            hello = Hello("observer", NAME, socket.gethostname(), to=COORDINATOR)
            # A machine that is probed needs no coordinator's certificate, with which it could be one
            _, keys = introduce(connection, hello, access.token, certificate="observer")
            self._channel = Channel(connection, address, keys)
        except BaseException:
            connection.close()
            raise
        connection.set_timeout(_ANSWER_S)

    def __enter__(self) -> ProbeLink:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def facts(self) -> MachineFacts:
        """The facts about the probe's machine; `clock` is how far its clock is ahead of this machine's."""
        facts = self._ask(AskFacts(), MachineFacts)
        return msgspec.structs.replace(facts, clock=facts.clock - time.time())

    def link_to(self, address: str) -> MeasuredLink:
        """Let the probe measure its link to another probe."""
        found, ends = self._ask(AskLink(address), MeasuredLink), {"source": self.address, "target": address}
        return msgspec.structs.replace(found, **ends, trouble=printable(found.trouble))

    def measure(self) -> MeasuredLink:
        """Measure the link from here to the probe: first round trips, then for a second as many bytes as it takes."""
        took = []
        for _ in range(_ROUNDS):
            began = time.perf_counter()
            self._ask(Ping(), Ping)
            took.append(time.perf_counter() - began)
        until, sent = time.monotonic() + _SENDS_S, threading.Semaphore(4)
        while time.monotonic() < until:
            sent.acquire()
            self._channel.send(Header(Kind.STATE, length=len(_PIECE)), memoryview(_PIECE), sent.release)
            if self._channel.fault is not None:
                break
        arrived = self._ask(AskArrived(), BytesArrived, urgent=False)  # behind the bulk, not before it
        rate = arrived.nbytes / arrived.seconds if arrived.seconds else 0.0
        return MeasuredLink(round_trip=statistics.median(took), rate=rate)

    def _ask(self, word: _Word, kind: type[_T], *, urgent: bool = True) -> _T:
        _say(self._channel, word, urgent=urgent)
        answer = _word_of(self._channel, self._channel.receive_header())
        if not isinstance(answer, kind):
            raise ProtocolError(f"{self.address} answered with {type(answer).__name__}")
        return answer


def _measured(access: Access, address: str) -> MeasuredLink:
    try:
        with ProbeLink(access, address) as asking:
            return asking.measure()
    except RallypointError as error:
        return MeasuredLink(trouble=printable(str(error), 150))


def _admit(hello: Hello) -> Welcome:
    if (hello.role, hello.id) != ("observer", NAME):
        raise AccessDenied("this is a probe of `rallypoint doctor`, not a job's coordinator")
    return Welcome()


def _say(channel: Channel, word: _Word | MachineFacts, *, urgent: bool = True) -> None:
    data = msgspec.msgpack.encode(word)
    channel.send(Header(Kind.CONTROL, length=len(data)), memoryview(data), urgent=urgent)


def _word_of(channel: Channel, header: Header) -> object:
    """Receive the rest of a control frame. ProtocolError if it is none, or cannot be read."""
    if header.kind is Kind.REFUSE:
        channel.receive_bytes(header)
        raise LinkError(f"{channel.name} has ended the connection")
    if header.kind is not Kind.CONTROL or header.length > _LONGEST:
        raise ProtocolError(f"a {header.kind.name} frame of {header.length} bytes from a doctor or a probe")
    data = channel.receive_bytes(header)
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a question that cannot be read: {printable(str(error), 80)}") from None


_MARKS = {Level.FINE: "[green]fine[/green]", Level.WARNING: "[yellow]look[/yellow]", Level.BAD: "[red]bad[/red]"}
_PATIENCE_S = 5.0
_TRIAL, _PIECES = "doctor-was-here", 16  # a file, written where snapshots go, and removed


class Doctor:
    """Examines, and prints to `console`. `worst` is the level of the worst finding so far."""

    def __init__(self, console: Console, access: Access, heartbeat: float = 3.0) -> None:
        self.worst = Level.FINE
        self._console, self._access, self._heartbeat = console, access, heartbeat

    def machine(self) -> MachineFacts:
        facts = msgspec.structs.replace(collect(), clock=0.0)
        for line in (
            f"Python {facts.python}, torch {facts.torch or 'none'}, rallypoint {facts.rallypoint}",
            f"{facts.processor} ({facts.capability}), {counted(facts.cores, 'core')}, {facts.memory / 2**30:.0f} GiB",
            f"GPUs: {', '.join(gpu.name for gpu in facts.gpus) or 'none'}; torch can use {facts.gpus_seen}",
            f"{facts.files:,} files may be open",
        ):
            self._console.print(f"      [dim]{escape(line)}[/dim]", soft_wrap=True)
        self._tell(of_machine(facts), f"{facts.host}: no problem in the lines above")
        if facts.kernels:
            self._tell([], f"{facts.host}: the probe computation gives {facts.kernels[:12]} (as on all like machines)")
        return facts

    def machines(self, here: MachineFacts, probes: Sequence[str]) -> None:
        """Examine the machines of these probes, and the links between each two of them; `here` is this machine."""
        found, links = {"this one": here}, list[MeasuredLink]()
        for address in probes:
            try:
                with ProbeLink(self._access, address) as asking:
                    facts = asking.facts()
                found[address] = facts
                self._tell(of_machine(facts), f"{address} ({facts.host}): no problem")
            except UnprovenPeer as error:
                self._tell([Advice(Level.BAD, f"{address}: {error}", "give this doctor the probes' --token-file")])
            except RallypointError as error:
                self._tell([Advice(Level.BAD, f"{address}: {error}", "does `rallypoint doctor --listen` run there?")])
        for source, target in itertools.permutations(probes, 2):
            self._console.print(f"[dim]{escape(f'measuring {source} -> {target}')}[/dim]")
            links.append(self._link(source, target))
        self._console.print(_table_of_machines(found))
        if links:
            self._console.print(_table_of_links(links))
        alike = f"{len(found)} machines are alike in all that changes bytes"
        self._tell(of_cluster(list(found.values())), alike if len(found) > 1 else "")
        self._tell(of_links(links, self._heartbeat), f"{len(links)} links are fit for each other" if links else "")

    def coordinator(self, address: str) -> None:
        """Is the coordinator of a job there, and does it take the token?"""
        began = time.perf_counter()
        me = Identity("observer", "doctor", self._access.token)
        try:
            link = CoordinatorLink(
                transport=self._access.transport, address=address, me=me, patience=_PATIENCE_S,
                handlers=Handlers(lambda message: None, lambda error: None),
            )  # fmt: skip
        except RallypointError as error:
            todo = "is it up, is the address right, is the port open, is the token that of the job?"
            self._tell([Advice(Level.BAD, f"no coordinator at {address}: {error}", todo)])
            return
        took = time.perf_counter() - began
        link.close()
        self._tell([], f"the coordinator at {address} takes this token; greeting it took {1000 * took:.0f} ms")

    def store(self, url: str) -> None:
        """Can snapshots be written there, and is there room?"""
        try:
            files = Files(url)
            began = time.perf_counter()
            with files.writing(_TRIAL) as write:
                for _ in range(_PIECES):
                    write(_PIECE)
            took = time.perf_counter() - began
            files.remove(_TRIAL)
        except (RallypointError, OSError) as error:
            self._tell([Advice(Level.BAD, f"{url}: {error}", "another --snapshots, or the right to write there")])
            return
        rate = f"at {1e-6 * _PIECES * len(_PIECE) / took:.0f} MB/s from this machine"
        if "://" in url:
            self._tell([], f"{url} can be written, {rate}")
        else:
            self._tell(of_space(url, free_bytes(Path(url)), rate))

    def _link(self, source: str, target: str) -> MeasuredLink:
        try:
            with ProbeLink(self._access, source) as asking:
                return asking.link_to(target)
        except RallypointError as error:
            return MeasuredLink(source, target, trouble=str(error))

    def _tell(self, findings: Sequence[Advice], otherwise: str = "") -> None:
        for finding in findings:
            self.worst = max(self.worst, finding.level)
            self._console.print(f"{_MARKS[finding.level]}  {escape(finding.text)}", soft_wrap=True)
            if finding.todo:
                self._console.print(f"      [dim]{escape(finding.todo)}[/dim]", soft_wrap=True)
        if otherwise and not findings:
            self._console.print(f"{_MARKS[Level.FINE]}  {escape(otherwise)}", soft_wrap=True)


def listen(access: Access, bind: str, console: Console) -> None:
    """Be the probe of this machine until Ctrl-C or SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    facts = collect()
    probe = Probe(access, bind, lambda: facts)
    try:
        console.print(f"the probe of {facts.host} listens at {escape(probe.address)}; Ctrl-C ends it", soft_wrap=True)
        while True:
            time.sleep(3600.0)
    except KeyboardInterrupt:
        console.print("the probe has ended")
    finally:
        probe.close()


def _table_of_machines(machines: Mapping[str, MachineFacts]) -> Table:
    table = Table("machine", "processor", "cores", "memory", "GPUs", "torch", "probe", "clock", box=SIMPLE)
    for name, facts in machines.items():
        gpus = ", ".join(f"{count} x {kind}" for kind, count in Counter(gpu.name for gpu in facts.gpus).items())
        table.add_row(
            escape(name), f"{facts.processor} ({facts.capability})", str(facts.cores),
            f"{facts.memory / 2**30:.0f} GiB", gpus or "none", facts.torch, facts.kernels[:12],
            f"{facts.clock:+.1f} s",
        )  # fmt: skip
    return table


def _table_of_links(links: Sequence[MeasuredLink]) -> Table:
    table = Table("from", "to", "round trip", "throughput", box=SIMPLE)
    for link in links:
        figures = (f"{1000 * link.round_trip:.2f} ms", bits(link.rate)) if not link.trouble else ("none", "none")
        table.add_row(escape(link.source), escape(link.target), *figures)
    return table
