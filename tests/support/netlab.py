"""A test network on one machine: hosts as network namespaces, connected by links of a known rate.

Each host is a namespace with one interface, ``eth0``, whose veth peer is a port of a bridge. The bridge lives in a
namespace of its own (the switch). So the root namespace never gets an interface, an address or a route, and two labs
may use the same addresses at once. A token bucket (tbf) at both ends of each link limits both directions::

    with Netlab(hosts=2, rate_mbit=200.0) as lab:
        lab.hosts[0].run(["ping", "-c", "1", lab.hosts[1].address], timeout=5)

With ``racks`` the first hosts stand in racks, each with a switch of its own and an uplink to the one of the others::

    Netlab(hosts=10, rate_mbit=100.0, racks=(4, 4), uplink_mbit=100.0)     # two racks of 4 (4:1), and 2 hosts outside

An uplink may take time, as between data centres; a rack may be cut off from all others::

    with Netlab(hosts=6, racks=(2, 2, 2), uplink_mbit=100.0, uplink_delay=0.025) as lab:   # 50 ms from rack to rack
        lab.cut_rack(2)
        lab.heal_rack(2)

The end of the ``with`` block removes everything that the lab made. Only a SIGKILL of this process leaves something:
namespaces named ``rp-*``, which ``ip netns del`` removes.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

from rallypoint.errors import RallypointError

MAX_HOSTS = 254  # one /24
MAX_DELAY_S = 10.0
_NETNS_FOLDER = Path("/run/netns")  # where `ip netns` keeps its names
_KILL_SECONDS = 10.0
_DELAY = Path(__file__).with_name("delay.py")
_CONGESTION_CONTROLS = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
_COMMAND_SECONDS = 30.0
_NOBODY = "02:00:00:00:00:01"  # a hardware address that no host has
_CLONE_NEWNET = 0x40000000  # from <sched.h>


class NetlabUnavailable(RallypointError):
    """This machine cannot make a lab. The message says which command failed and what a lab needs."""


class Host:
    """One host of a lab.

    ``name`` is its namespace, ``address`` its IPv4 address, ``folder`` a private folder for its files. Namespaces share
    the file system, so a file that two hosts would write under the same name belongs there.
    """

    def __init__(self, name: str, address: str, folder: Path, *, switch: str, port: str) -> None:
        self.name = name
        self.address = address
        self.folder = folder
        self._switch = switch
        self._port = port
        self._processes: list[subprocess.Popen[Any]] = []

    def __repr__(self) -> str:
        return f"Host({self.name!r}, {self.address!r})"

    def popen(self, argv: Sequence[str], **popen_kwargs: Any) -> subprocess.Popen[Any]:
        """Start ``argv`` on this host, in its own session. If it still runs when the lab ends, it is killed and reaped.

        The keywords are those of ``subprocess.Popen``. The pid is the command's, because ``ip netns exec`` execs.
        """
        command = ["ip", "netns", "exec", self.name, *argv]
        process: subprocess.Popen[Any] = subprocess.Popen(command, start_new_session=True, **popen_kwargs)
        self._processes.append(process)
        return process

    def run(self, argv: Sequence[str], timeout: float | None = None) -> subprocess.CompletedProcess[str]:
        """Run ``argv`` on this host to its end; returns its exit status and its output as text.

        Raises ``subprocess.TimeoutExpired`` after ``timeout`` seconds; the command and its children are killed.
        """
        pipe = subprocess.PIPE
        with self.popen(argv, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except BaseException:  # a KeyboardInterrupt too: the end of the block waits for the process
                _kill_group(process)
                raise
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)

    def set_rate(self, mbit: float | None) -> None:
        """Limit both directions of this host's link to ``mbit`` Mbit/s from now on; ``None`` lifts the limit."""
        _call(["tc", "-n", self.name, "-batch", "-"], [_shape("eth0", mbit)])
        _call(["tc", "-n", self._switch, "-batch", "-"], [_shape(self._port, mbit)])

    def cut(self, *others: Host) -> None:
        """From now on nothing that this host sends to `others` arrives; what they send to it does.

        Nobody is told: no reset, no ICMP message, the interfaces stay up. The frames go to a hardware address that
        nobody has.
        """
        lines = [f"neigh replace {other.address} lladdr {_NOBODY} nud permanent dev eth0" for other in others]
        _call(["ip", "-n", self.name, "-batch", "-"], lines)

    def heal(self, *others: Host) -> None:
        """Undo `cut`."""
        lines = [f"neigh del {other.address} dev eth0" for other in others]
        _call(["ip", "-n", self.name, "-batch", "-"], lines)

    def enter(self) -> None:
        """Move the calling thread onto this host, with the threads that it starts from now on."""
        with (_NETNS_FOLDER / self.name).open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.name}")


class Netlab:
    """A context manager: ``hosts`` hosts on one switch, each link limited to ``rate_mbit`` Mbit/s in each direction.

    ``racks``: the first ``racks[0]`` hosts are in one rack, the next ``racks[1]`` in another, and so on. The uplink of
    each rack is limited to ``uplink_mbit`` in each direction; what takes it arrives ``uplink_delay`` seconds later, so
    twice as much later in another rack. That is a program that passes frames on (`delay.py`); it needs /dev/net/tun.

    TCP gets about 0.95 of the rate as payload; headers take the rest. ``rate_mbit=None`` means unlimited. Raises
    ``ValueError`` for numbers out of range, and ``NetlabUnavailable`` on entry when this machine cannot make a lab.
    """

    def __init__(
        self, hosts: int, rate_mbit: float | None = None, *, racks: Sequence[int] = (),
        uplink_mbit: float | None = None, uplink_delay: float = 0.0,
    ) -> None:  # fmt: skip
        if not 1 <= hosts <= MAX_HOSTS:
            raise ValueError(f"a lab has 1 to {MAX_HOSTS} hosts, not {hosts}")
        if min(racks, default=1) < 1 or sum(racks) > hosts:
            raise ValueError(f"racks of {', '.join(map(str, racks))} hosts: there are {hosts}")
        if not 0.0 <= uplink_delay <= MAX_DELAY_S:
            raise ValueError(f"an uplink's delay is 0 to {MAX_DELAY_S:g} s, not {uplink_delay}")
        _shape("up0", uplink_mbit)
        _shape("eth0", rate_mbit)  # refuse an impossible rate here, not half-way through the set-up
        self.hosts: tuple[Host, ...] = ()
        self._switch = ""
        self._delays: _Delays | None = None
        self._count = hosts
        self._rate, self._racks, self._uplink, self._delay = rate_mbit, tuple(racks), uplink_mbit, uplink_delay
        self._teardown = ExitStack()

    def __enter__(self) -> Netlab:
        lab = f"rp-{secrets.token_hex(4)}"
        self._switch = f"{lab}-sw"
        with ExitStack() as teardown:
            folder = Path(teardown.enter_context(TemporaryDirectory(prefix=f"{lab}-")))
            self.hosts = tuple(_host(lab, number, folder) for number in range(self._count))
            # Register each undo before its action: a set-up that stops half-way is then undone like a whole one.
            teardown.callback(_delete_namespaces, [self._switch, *(host.name for host in self.hosts)])
            teardown.callback(_kill_hosts, self.hosts)
            _build(self._switch, self.hosts, self._rate, self._bridges())
            if self._racks and self._delay:
                self._delays = teardown.enter_context(_Delays(self._switch, len(self._racks), self._delay))
            elif self._racks:
                _add_wires(self._switch, len(self._racks))
            _add_uplinks(self._switch, len(self._racks), self._uplink, self._delay)
            self._teardown = teardown.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._teardown.close()

    def rack(self, number: int) -> tuple[Host, ...]:
        """The hosts of this rack."""
        first = sum(self._racks[:number])
        return self.hosts[first : first + self._racks[number]]

    def cut_rack(self, number: int) -> None:
        """From now on nothing goes between this rack and all other hosts, in either direction: see `Host.cut`.

        What has taken the uplink already still arrives.
        """
        self._at_border(number, Host.cut)

    def heal_rack(self, number: int) -> None:
        """Undo `cut_rack`."""
        self._at_border(number, Host.heal)

    def uplink_bytes(self, number: int) -> tuple[int, int]:
        """(bytes out of this rack, bytes into it) over its uplink until now, with all headers."""
        listed = _call(["ip", "-n", self._switch, "-s", "-j", "link", "show", "dev", f"up{number + 1}"])
        (link,) = json.loads(listed)
        return int(link["stats64"]["tx"]["bytes"]), int(link["stats64"]["rx"]["bytes"])

    def _at_border(self, number: int, act: Callable[..., None]) -> None:
        inside = self.rack(number)
        outside = [host for host in self.hosts if host not in inside]
        for host in inside:
            act(host, *outside)
        for host in outside:
            act(host, *inside)

    def _bridges(self) -> list[str]:
        """Each host's switch: br0 is that of the hosts that are in no rack."""
        racks = [f"br{rack + 1}" for rack, size in enumerate(self._racks) for _ in range(size)]
        return racks + ["br0"] * (self._count - len(racks))


def require() -> None:
    """Raise ``NetlabUnavailable``, with the reason, unless this machine can make a (tiny) lab."""
    if not sys.platform.startswith("linux"):
        raise NetlabUnavailable(f"netlab needs Linux network namespaces; this is {sys.platform}")
    with Netlab(hosts=1, rate_mbit=1000.0):
        pass


# Set-up -------------------------------------------------------------------------------------------------------------


def _host(lab: str, number: int, folder: Path) -> Host:
    """Return a host and make its folder; its namespace is made later."""
    own_folder = folder / f"h{number}"
    own_folder.mkdir()
    return Host(f"{lab}-h{number}", f"10.77.0.{number + 1}", own_folder, switch=f"{lab}-sw", port=f"port{number}")


def _build(switch: str, hosts: Sequence[Host], rate: float | None, bridges: Sequence[str]) -> None:
    _call(["ip", "-batch", "-"], [f"netns add {switch}", *(f"netns add {host.name}" for host in hosts)])
    links: list[str] = []
    for bridge in sorted({"br0", *bridges}):
        links += [f"link add {bridge} type bridge", f"link set {bridge} up"]
    for host, bridge in zip(hosts, bridges, strict=True):
        # Created in the switch with its peer in the host, so it never passes through the root namespace.
        links.append(f"link add {host._port} type veth peer name eth0 netns {host.name}")
        links.append(f"link set {host._port} master {bridge} up")
    _call(["ip", "-n", switch, "-batch", "-"], links)
    for host in hosts:
        _call(["ip", "-n", host.name, "-batch", "-"], _addressing(host.address))
        if rate is not None:
            _call(["tc", "-n", host.name, "-batch", "-"], [_shape("eth0", rate)])
    if rate is not None:
        _call(["tc", "-n", switch, "-batch", "-"], [_shape(host._port, rate) for host in hosts])


def _add_wires(switch: str, racks: int) -> None:
    """Make each rack's uplink, a pair of interfaces."""
    wires = [f"link add up{rack} type veth peer name down{rack}" for rack in range(1, racks + 1)]
    _call(["ip", "-n", switch, "-batch", "-"], wires)


class _Delays:
    """The uplinks as interfaces of the program that delays them, while the context lasts."""

    def __init__(self, switch: str, racks: int, seconds: float) -> None:
        pairs = [f"up{rack}:down{rack}" for rack in range(1, racks + 1)]
        self._argv = ["ip", "netns", "exec", switch, sys.executable, "-S", str(_DELAY), str(seconds), *pairs]

    def __enter__(self) -> _Delays:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            self._argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        try:
            assert self.process.stdout is not None
            assert self.process.stderr is not None
            if self.process.stdout.readline() != "up\n":
                said = self.process.stderr.read().strip().rpartition("\n")[2]
                raise NetlabUnavailable(f"the program that delays uplinks failed ({said}): it needs /dev/net/tun")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        _kill_group(self.process)
        self.process.communicate(timeout=_KILL_SECONDS)


def _add_uplinks(switch: str, racks: int, rate: float | None, delay: float) -> None:
    """Connect each rack's switch with br0.

    The queue before a long uplink holds what it carries in the time there and back, as a router's does: a shorter one
    loses pieces at each burst, and TCP takes many round trips to come back.
    """
    lines: list[str] = []
    for rack in range(1, racks + 1):
        lines += [f"link set up{rack} master br{rack} up", f"link set down{rack} master br0 up"]
    if lines:
        _call(["ip", "-n", switch, "-batch", "-"], lines)
    if rate is not None:
        ends = [end for rack in range(1, racks + 1) for end in (f"up{rack}", f"down{rack}")]
        _call(["tc", "-n", switch, "-batch", "-"], [_shape(end, rate, 4 * delay) for end in ends])


def _addressing(address: str) -> list[str]:
    """Return the `ip` lines that bring a host's interfaces up, with cubic as TCP's congestion control between hosts.

    bbr, the default of some machines, costs several per cent of such a link. The choice is set on the route, because a
    namespace's sysctl accepts only what the root namespace allows, and we must not change that list.
    """
    has_cubic = _CONGESTION_CONTROLS.exists() and "cubic" in _CONGESTION_CONTROLS.read_text().split()
    congestion = " congctl cubic" if has_cubic else ""
    return [
        "link set lo up",
        f"addr add {address}/24 dev eth0 noprefixroute",
        "link set eth0 up",
        f"route add 10.77.0.0/24 dev eth0 scope link src {address}{congestion}",
    ]


def _shape(interface: str, mbit: float | None, queue_seconds: float = 0.010) -> str:
    """Return the `tc` line that limits what leaves ``interface``; of a longer queue than its rate needs in that time
    the rest is lost (512 KiB may always wait).

    An existing limit is changed in place and keeps its queue.
    """
    if mbit is None:
        return f"qdisc replace dev {interface} root noqueue"
    if not 0.01 <= mbit <= 1e6:
        raise ValueError(f"a link's rate is 0.01 to 1000000 Mbit/s, or None for unlimited, not {mbit}")
    bytes_per_second = mbit * 1e6 / 8
    burst = max(96 * 1024, int(0.0005 * bytes_per_second))  # holds a 64 KiB GSO packet, which tbf would otherwise split
    limit = max(512 * 1024, int(queue_seconds * bytes_per_second))
    return f"qdisc replace dev {interface} root tbf rate {int(mbit * 1e6)}bit burst {burst} limit {limit}"


def _call(argv: Sequence[str], lines: Iterable[str] = ()) -> str:
    """Run one `ip` or `tc` command, with ``lines`` as its batch; returns its output.

    A failure raises an error of one sentence.
    """
    batch = "".join(f"{line}\n" for line in lines)
    command = " ".join(argv)
    try:
        ran = subprocess.run(argv, input=batch, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=True)
        return ran.stdout
    except FileNotFoundError as error:
        raise NetlabUnavailable(f"netlab needs `{argv[0]}`, which is not on PATH: install iproute2") from error
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        said = " ".join(str(error.stderr or error).split())
        needs = "a lab needs Linux, root or CAP_NET_ADMIN and CAP_SYS_ADMIN, and the kernel's veth, bridge and tbf"
        raise NetlabUnavailable(f"`{command}` failed ({said}): {needs}") from error


# Teardown -----------------------------------------------------------------------------------------------------------


def _delete_namespaces(names: Sequence[str]) -> None:
    """Delete those of ``names`` that exist; their interfaces, links and limits go with them."""
    there = [name for name in names if (_NETNS_FOLDER / name).exists()]
    if there:
        _call(["ip", "-force", "-batch", "-"], [f"netns del {name}" for name in there])


def _kill_hosts(hosts: Sequence[Host]) -> None:
    """Kill and reap what runs on these hosts."""
    _kill_all([process for host in hosts for process in host._processes], [host.name for host in hosts])


# ---- ending what runs in a lab's namespaces ----


def _kill_all(processes: Sequence[subprocess.Popen[Any]], names: Sequence[str]) -> None:
    """Kill and reap these processes, then all others in these namespaces: what those started in other sessions."""
    for process in processes:
        _kill_group(process)
    for process in processes:
        process.wait(_KILL_SECONDS)
    while _kill_inhabitants(names):  # repeat: a process may have forked between being seen and being killed
        pass


def _kill_group(process: subprocess.Popen[Any]) -> None:
    """Kill a process and its group unless it is reaped. Until then its pid, which is the group's, is not reused."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _kill_inhabitants(names: Sequence[str]) -> int:
    """Kill each process in the network namespaces ``names`` and wait for its end. Returns how many there were."""
    inside = {_identity(_NETNS_FOLDER / name) for name in names} - {None}
    killed = 0
    for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        if pid != os.getpid() and _identity(Path(f"/proc/{pid}/ns/net")) in inside:
            killed += _kill_inhabitant(pid, inside)
    return killed


def _kill_inhabitant(pid: int, inside: set[tuple[int, int] | None]) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    with ExitStack() as stack:
        stack.callback(os.close, descriptor)
        if _identity(Path(f"/proc/{pid}/ns/net")) not in inside:  # the pid was reused before we opened it
            return False
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        if not poller.poll(_KILL_SECONDS * 1000):
            raise RallypointError(f"process {pid} of a lab did not die within {_KILL_SECONDS:g} s of its SIGKILL")
    return True


def _identity(namespace: Path) -> tuple[int, int] | None:
    """Return what is the same for two paths to one namespace; None if it is gone (a zombie has none)."""
    try:
        status = namespace.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
