"""`rallypoint doctor`: what facts mean, and probes that measure real links."""

from __future__ import annotations

import contextlib
import io
import os
import re
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from rallypoint.core.protocol import Hello
from rallypoint.errors import AccessDenied, UnprovenPeer, UsageError
from rallypoint.launch.access import Access, access_of
from rallypoint.launch.commands.doctor import (
    FEWEST_FILES,
    LITTLE_SPACE,
    Advice,
    Doctor,
    GpuFacts,
    Level,
    MachineFacts,
    MeasuredLink,
    Probe,
    ProbeLink,
    bits,
    collect,
    free_bytes,
    gpus_of,
    of_cluster,
    of_links,
    of_machine,
    of_space,
)
from rallypoint.net.certificates import TlsFiles, make_certificates
from rallypoint.net.channel import Channel
from rallypoint.net.frames import Header, Kind
from rallypoint.net.handshake import COORDINATOR, introduce, new_token
from rallypoint.net.tls import TlsTransport
from support.programs import run_program

SOUND = MachineFacts(
    host="a", rallypoint="1", protocol=10, python="3.12", torch="2.13.0+cpu", processor="x", capability="AVX2", cores=2,
    memory=1 << 30, files=FEWEST_FILES, threads={}, cubic=True, clock=0.0,
)  # fmt: skip


def facts(**changed: Any) -> MachineFacts:
    return msgspec.structs.replace(SOUND, **changed)


def said(findings: list[Advice]) -> str:
    return "\n".join(f"{finding.level.name} {finding.text}: {finding.todo}" for finding in findings)


# ---- what facts mean ----------------------------------------------------------------------------------------------


def test_a_sound_machine_needs_nothing() -> None:
    assert of_machine(SOUND) == []


@pytest.mark.parametrize(("changed", "level", "words"), [
    ({"torch": ""}, Level.BAD, "pip install torch"),
    ({"files": FEWEST_FILES - 1}, Level.WARNING, "ulimit -n"),
    ({"cubic": False}, Level.WARNING, "tcp_cubic"),
    ({"gpu_trouble": "No devices were found"}, Level.BAD, "No devices were found"),
    ({"gpus": (GpuFacts("H200", "560", 1),)}, Level.WARNING, "CPU build"),
    ({"gpus": (GpuFacts("H200", "560", 1),), "cuda": "13.0"}, Level.WARNING, "driver (560) too old for CUDA 13.0"),
])  # fmt: skip
def test_each_fault_of_a_machine_has_a_remedy(changed: dict[str, Any], level: Level, words: str) -> None:
    (finding,) = of_machine(facts(**changed))
    assert finding.level is level
    assert words in said([finding])
    assert finding.todo


def test_a_gpu_that_torch_can_use_is_no_finding() -> None:
    assert of_machine(facts(gpus=(GpuFacts("H200", "560", 1),), gpus_seen=1, cuda="13.0")) == []


def test_machines_that_are_alike_need_nothing() -> None:
    assert of_cluster([SOUND, facts(host="b", torch="2.13.0+cu130", clock=2.0)]) == []


@pytest.mark.parametrize(("changed", "level", "words"), [
    ({"protocol": 11}, Level.BAD, "protocol numbers: 10 (2 machines), 11 (1 machine)"),
    ({"torch": "2.9.0"}, Level.WARNING, "versions of torch"),
    ({"capability": "AVX512"}, Level.WARNING, "AVX2 (2 machines), AVX512 (1 machine)"),
    ({"threads": {"OMP_NUM_THREADS": "4"}}, Level.WARNING, "not set (2 machines), 4 (1 machine)"),
    ({"gpus": (GpuFacts("T4", "560", 1),)}, Level.WARNING, "none (2 machines), T4 (1 machine)"),
    ({"kernels": "0123456789abcdef"}, Level.WARNING, "none (2 machines), 0123456789ab (1 machine)"),
    ({"clock": -61.0}, Level.WARNING, "61 s apart"),
])  # fmt: skip
def test_each_difference_that_matters_is_told(changed: dict[str, Any], level: Level, words: str) -> None:
    (finding,) = of_cluster([SOUND, facts(host="b"), facts(host="c", **changed)])
    assert finding.level is level
    assert words in finding.text
    assert finding.todo


def test_a_slow_link_a_long_one_and_none_are_told() -> None:
    links = [
        MeasuredLink("a", "b", 0.001, 100e6), MeasuredLink("b", "a", 0.001, 120e6), MeasuredLink("a", "c", 0.001, 40e6),
        MeasuredLink("c", "a", 0.8, 110e6), MeasuredLink("c", "b", trouble="nobody answers"),
    ]  # fmt: skip
    text = said(of_links(links, heartbeat=3.0))
    assert "WARNING a -> c: 320 Mbit/s, where the median link has 840 Mbit/s" in text
    assert "WARNING c -> a: a round trip takes 0.8 s" in text
    assert "BAD c -> b: nobody answers" in text
    assert len(text.splitlines()) == 3


def test_little_space_for_snapshots_is_told() -> None:
    assert of_space("snaps", LITTLE_SPACE, "at 1 MB/s")[0].level is Level.FINE
    assert of_space("snaps", LITTLE_SPACE - 1, "at 1 MB/s")[0].level is Level.WARNING


def test_a_rate_reads_as_people_name_a_link() -> None:
    assert [bits(12.5e6), bits(1.25e9)] == ["100 Mbit/s", "10.0 Gbit/s"]


def test_what_nvidia_smi_lists_is_read() -> None:
    assert gpus_of(["NVIDIA H200, 560.35, 143771", "odd"]) == (GpuFacts("NVIDIA H200", "560.35", 143771 << 20),)
    assert gpus_of(["NVIDIA X, 1, [N/A]"]) == (GpuFacts("NVIDIA X", "1", 0),)


def test_the_facts_about_this_machine_can_be_sent(tmp_path: Path) -> None:
    found = collect()
    assert found.host == socket.gethostname()
    assert found.cores >= 1
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=MachineFacts) == found
    assert free_bytes(tmp_path / "not" / "yet" / "there") > 0


# ---- probes -------------------------------------------------------------------------------------------------------


@pytest.fixture
def access() -> Access:
    return Access(new_token())


@pytest.fixture
def probe(access: Access) -> Iterator[Probe]:
    probe = Probe(access, "127.0.0.1:0", lambda: SOUND)
    yield probe
    probe.close()


def test_a_probe_tells_its_facts_and_measures_its_link_to_another(probe: Probe, access: Access) -> None:
    other = Probe(access, "127.0.0.1:0", lambda: SOUND)
    try:
        with ProbeLink(access, probe.address) as asking:
            told = asking.facts()
            assert msgspec.structs.replace(told, clock=0.0) == SOUND
            assert abs(told.clock) < 5.0, "seconds between the clocks, not a time"
            link = asking.link_to(other.address)
        assert (link.source, link.target, link.trouble) == (probe.address, other.address, "")
        assert 0 < link.round_trip < 1
        assert link.rate > 1e6
    finally:
        other.close()


def test_a_probe_that_is_not_there_is_the_links_trouble(probe: Probe, access: Access) -> None:
    with ProbeLink(access, probe.address) as asking:
        assert "nobody answers" in asking.link_to("127.0.0.1:1").trouble
        assert "not an address" in asking.link_to("nonsense").trouble
        assert asking.facts().host == "a", "the probe goes on"


def test_only_a_doctor_that_knows_the_token_is_served(probe: Probe, access: Access) -> None:
    with pytest.raises(UnprovenPeer):
        ProbeLink(Access(new_token()), probe.address)
    connection = access.transport.connect(probe.address, 5.0)
    try:
        with pytest.raises(AccessDenied, match="not a job's coordinator"):
            introduce(connection, Hello("worker", "w0", "here", to=COORDINATOR), access.token)
    finally:
        connection.close()


@pytest.mark.parametrize("frame", [
    (Kind.CONTROL, b"\xc1"), (Kind.CONTROL, msgspec.msgpack.encode({"type": "Told"})), (Kind.CONTROL, bytes(1 << 17)),
    (Kind.STATE, bytes((1 << 20) + 1)), (Kind.PUSH, b"x"),
])  # fmt: skip
def test_what_no_doctor_says_ends_the_connection_and_nothing_else(
    probe: Probe, access: Access, frame: tuple[Kind, bytes]
) -> None:
    kind, payload = frame
    connection = access.transport.connect(probe.address, 5.0)
    _, keys = introduce(connection, Hello("observer", "doctor", "here", to=COORDINATOR), access.token)
    channel = Channel(connection, "probe", keys)
    try:
        channel.send(Header(kind, length=len(payload)), memoryview(payload))
        assert channel.receive_header().kind is Kind.REFUSE
    finally:
        channel.close()
    with ProbeLink(access, probe.address) as asking:
        assert asking.facts().host == "a"


def test_a_probe_that_others_can_reach_needs_a_token() -> None:
    with pytest.raises(UsageError, match="token"):
        Probe(Access(), "0.0.0.0:0", lambda: SOUND)


# ---- the doctor ---------------------------------------------------------------------------------------------------


def examine(access: Access, *probes: str) -> tuple[Level, str]:
    out = io.StringIO()
    doctor = Doctor(Console(file=out, width=200), access)
    doctor.machines(SOUND, probes)
    return doctor.worst, out.getvalue()


def test_the_doctor_shows_machines_and_links(probe: Probe, access: Access) -> None:
    other = Probe(access, "127.0.0.1:0", lambda: facts(host="b", capability="AVX512"))
    try:
        worst, text = examine(access, probe.address, other.address)
    finally:
        other.close()
    assert worst is Level.WARNING
    assert "different processor capabilities: AVX2 (2 machines), AVX512 (1 machine)" in text
    assert "2 links are fit for each other" in text
    assert text.count("Mbit/s") + text.count("Gbit/s") == 2


def test_addresses_with_brackets_are_shown_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def asking(access: Access, address: str) -> contextlib.AbstractContextManager[SimpleNamespace]:
        measured = partial(MeasuredLink, address, round_trip=0.0001, rate=1e9)
        return contextlib.nullcontext(SimpleNamespace(facts=lambda: SOUND, link_to=measured))

    monkeypatch.setattr("rallypoint.launch.commands.doctor.ProbeLink", asking)
    here, there = "[fd00::1]:4700", "[fd00::2]:4700"
    _, text = examine(Access(), here, there)
    assert f"fine  {here} (a): no problem" in text
    assert f"measuring {here} -> {there}" in text
    assert re.search(rf"{re.escape(here)} +{re.escape(there)} +0.10 ms", text)


def test_a_probe_that_does_not_answer_is_a_bad_finding(probe: Probe, access: Access) -> None:
    worst, text = examine(access, probe.address, "127.0.0.1:1")
    assert worst is Level.BAD
    assert "--listen" in text


def test_a_doctor_with_another_token_is_told_so(probe: Probe) -> None:
    worst, text = examine(Access(new_token()), probe.address)
    assert worst is Level.BAD
    assert "give this doctor the probes' --token-file" in text


def test_it_says_whether_snapshots_can_be_written(tmp_path: Path) -> None:
    out = io.StringIO()
    doctor = Doctor(Console(file=out, width=200), Access())
    doctor.store(str(tmp_path))
    assert "MB/s" in out.getvalue()
    assert os.listdir(tmp_path) == []
    (tmp_path / "file").touch()
    doctor.store(str(tmp_path / "file" / "folder"))
    assert doctor.worst is Level.BAD


def test_it_says_when_there_is_no_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rallypoint.launch.commands.doctor._PATIENCE_S", 0.0)
    out = io.StringIO()
    doctor = Doctor(Console(file=out, width=200), Access(new_token()))
    doctor.coordinator("127.0.0.1:1")
    assert doctor.worst is Level.BAD
    assert "no coordinator at 127.0.0.1:1" in out.getvalue()


@pytest.mark.programs
def test_the_command_examines_this_machine(tmp_path: Path) -> None:
    status, text = run_program(
        ["-m", "rallypoint.cli", "doctor", "--snapshots", str(tmp_path)], tmp_path / "output", env=dict(os.environ)
    )
    assert status == 0, text
    assert socket.gethostname() in text
    assert "for snapshots" in text


def test_with_tls_a_probed_machine_needs_the_observers_certificate_alone(tmp_path: Path) -> None:
    """With the coordinator's, it could be the coordinator of any job of this CA."""
    make_certificates(tmp_path / "certs")
    for role in ("coordinator", "server", "worker", "aggregator", "ca"):
        (tmp_path / "certs" / role).rename(tmp_path / role)
    access = access_of("", "observer", str(tmp_path / "certs"), bind="0.0.0.0:0")
    told = io.StringIO()
    probes = [Probe(access, "127.0.0.1:0", facts) for _ in range(2)]
    try:
        doctor = Doctor(Console(file=told, width=300), access)
        doctor.machines(SOUND, [probe.address for probe in probes])
        assert doctor.worst is Level.FINE, told.getvalue()
        worker = Access(transport=TlsTransport(TlsFiles(tmp_path / "worker", "worker")))
        with pytest.raises(AccessDenied, match="the certificate of a worker"):
            ProbeLink(worker, probes[0].address)
    finally:
        for probe in probes:
            probe.close()
    assert "2 links are fit for each other" in told.getvalue()


def test_it_says_what_it_looked_at_also_where_nothing_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr("rallypoint.launch.commands.doctor.collect", lambda: facts(processor="a chip"))
    Doctor(Console(file=out, width=200), Access()).machine()
    for said in ("Python 3.12, torch 2.13.0+cpu", "a chip (AVX2), 2 cores, 1 GiB", "GPUs: none", "in the lines above"):
        assert said in out.getvalue()
