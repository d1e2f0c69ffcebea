"""The doctor: collects facts here and from probes, lets probes measure their links, and prints what it all means."""

from __future__ import annotations

import itertools
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rallypoint.errors import RallypointError, UnprovenPeer
from rallypoint.launch.access import Access
from rallypoint.launch.doctor.facts import Facts, collect, free_bytes
from rallypoint.launch.doctor.findings import Finding, Level, Link, bits, of_cluster, of_links, of_machine, of_space
from rallypoint.launch.doctor.probe import Asking, Probe
from rallypoint.net.handshake import Identity
from rallypoint.net.member import CoordinatorLink, Handlers
from rallypoint.store.files import Files

_MARKS = {Level.FINE: "[green]fine[/green]", Level.WARNING: "[yellow]look[/yellow]", Level.BAD: "[red]bad[/red]"}
_PATIENCE_S = 5.0
_TRIAL, _PIECE, _PIECES = "doctor-was-here", bytes(1 << 20), 16  # a file, written where snapshots go, and removed


class Doctor:
    """Examines, and prints to `console`. `worst` is the level of the worst finding so far."""

    def __init__(self, console: Console, access: Access, heartbeat: float = 3.0) -> None:
        self.worst = Level.FINE
        self._console, self._access, self._heartbeat = console, access, heartbeat

    def machine(self) -> Facts:
        """Examine this machine."""
        facts = msgspec.structs.replace(collect(), clock=0.0)
        self._tell(of_machine(facts), f"{facts.host}: nothing to mend")
        if facts.kernels:
            self._tell([], f"{facts.host}: the probe computation gives {facts.kernels[:12]} (as on all like machines)")
        return facts

    def machines(self, here: Facts, probes: Sequence[str]) -> None:
        """Examine the machines of these probes, and the links between each two of them; `here` is this machine."""
        found, links = {"this one": here}, list[Link]()
        for address in probes:
            try:
                with Asking(self._access, address) as asking:
                    facts = asking.facts()
                found[address] = facts
                self._tell(of_machine(facts), f"{address} ({escape(facts.host)}): nothing to mend")
            except UnprovenPeer as error:
                self._tell([Finding(Level.BAD, f"{address}: {error}", "give this doctor the probes' --token-file")])
            except RallypointError as error:
                self._tell([Finding(Level.BAD, f"{address}: {error}", "does `rallypoint doctor --listen` run there?")])
        for source, target in itertools.permutations(probes, 2):
            self._console.print(f"[dim]measuring {source} -> {target}[/dim]")
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
            self._tell([Finding(Level.BAD, f"no coordinator at {address}: {error}", todo)])
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
            self._tell([Finding(Level.BAD, f"{url}: {error}", "another --snapshots, or the right to write there")])
            return
        rate = f"at {1e-6 * _PIECES * len(_PIECE) / took:.0f} MB/s from this machine"
        if "://" in url:
            self._tell([], f"{url} can be written, {rate}")
        else:
            self._tell(of_space(url, free_bytes(Path(url)), rate))

    def _link(self, source: str, target: str) -> Link:
        try:
            with Asking(self._access, source) as asking:
                return asking.link_to(target)
        except RallypointError as error:
            return Link(source, target, trouble=str(error))

    def _tell(self, findings: Sequence[Finding], otherwise: str = "") -> None:
        for finding in findings:
            self.worst = max(self.worst, finding.level)
            self._console.print(f"{_MARKS[finding.level]}  {escape(finding.text)}", soft_wrap=True)
            if finding.todo:
                self._console.print(f"      [dim]{escape(finding.todo)}[/dim]", soft_wrap=True)
        if otherwise and not findings:
            self._console.print(f"{_MARKS[Level.FINE]}  {otherwise}", soft_wrap=True)


def listen(access: Access, bind: str, console: Console) -> None:
    """Be the probe of this machine until Ctrl-C or SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    facts = collect()
    probe = Probe(access, bind, lambda: facts)
    try:
        console.print(f"the probe of {facts.host} listens at {probe.address}; Ctrl-C ends it", soft_wrap=True)
        while True:
            time.sleep(3600.0)
    except KeyboardInterrupt:
        console.print("the probe has ended")
    finally:
        probe.close()


def _table_of_machines(machines: Mapping[str, Facts]) -> Table:
    table = Table("machine", "processor", "cores", "memory", "GPUs", "torch", "probe", "clock", box=SIMPLE)
    for name, facts in machines.items():
        gpus = ", ".join(f"{count} x {kind}" for kind, count in Counter(gpu.name for gpu in facts.gpus).items())
        table.add_row(
            escape(name), f"{facts.processor} ({facts.capability})", str(facts.cores),
            f"{facts.memory / 2**30:.0f} GiB", gpus or "none", facts.torch, facts.kernels[:12],
            f"{facts.clock:+.1f} s",
        )  # fmt: skip
    return table


def _table_of_links(links: Sequence[Link]) -> Table:
    table = Table("from", "to", "round trip", "throughput", box=SIMPLE)
    for link in links:
        figures = (f"{1000 * link.round_trip:.2f} ms", bits(link.rate)) if not link.trouble else ("none", "none")
        table.add_row(link.source, link.target, *figures)
    return table
