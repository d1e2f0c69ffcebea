"""Whole programs with TLS: the commands of docs/clusters.md, certificates renewed on the way, runs on this machine."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.launch.folder import read_where
from rallypoint.net.certificates import CERTIFICATE
from support.beside import until
from support.members import Members, members_in, script
from support.programs import run_program

pytestmark = [pytest.mark.programs, pytest.mark.slow]

WRITES = 'pathlib.Path("weights-" + os.environ["RALLYPOINT_ID"]).write_bytes(model.weight.detach().numpy().tobytes())'
BARE = {key: value for key, value in os.environ.items() if not key.startswith("RALLYPOINT_")} | {"COLUMNS": "200"}


def sha(members: Members, name: str) -> str:
    """The hash of the weights that a worker has written."""
    return hashlib.sha256((members.folder / f"weights-{name}").read_bytes()).hexdigest()


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    with members_in(tmp_path, BARE) as made:
        yield made


def certs(folder: Path) -> str:
    arguments = ["-m", "rallypoint.cli", "token", "--tls", str(folder)]
    status, text = run_program(arguments, folder.parent / "said", env=BARE)
    assert status == 0, text
    return text


def test_a_cluster_by_hand_with_tls_and_no_token_ends_with_the_bytes_of_one_process(members: Members) -> None:
    """Reachable from other machines, as far as it knows. Certificates are renewed before the last member comes."""
    (members.folder / "train.py").write_text(script(6, after=WRITES))
    folder = members.folder / "certificates"
    assert "certificates for every role are in" in certs(folder)
    old = (folder / "worker" / CERTIFICATE).read_bytes()
    tls = ["--tls", str(folder)]
    members.start("coordinator", "coordinator", "--bind", "0.0.0.0:0", "--advertise", "127.0.0.1", *tls)
    address = members.until("coordinator", r"listens at (\S+)\n")
    assert "token" not in members.said("coordinator")
    members.start("s0", "server", "--coordinator", address, env={"RALLYPOINT_TLS": str(folder / "server")})
    members.until("s0", r"(has joined the job)")
    certs(folder)
    assert (folder / "worker" / CERTIFICATE).read_bytes() != old
    env = {"RALLYPOINT_COORDINATOR": address, "RALLYPOINT_TLS": str(folder), "OMP_NUM_THREADS": "1"}
    members.start_python("w0", "train.py", env=env)
    for name, program in members.started.items():
        assert program.wait(60.0) == 0, f"{name}: {members.said(name)}"

    alone = BARE | {"RALLYPOINT_ID": "alone", "OMP_NUM_THREADS": "1"}
    status, text = run_program(["train.py"], members.folder / "said", env=alone, cwd=members.folder)
    assert status == 0, text
    assert sha(members, "w0") == sha(members, "alone")


def test_with_neither_token_nor_tls_nobody_listens_where_others_can_connect(tmp_path: Path) -> None:
    arguments = ["-m", "rallypoint.cli", "server", "--bind", "0.0.0.0:0", "--coordinator", "127.0.0.1:1"]
    status, text = run_program(arguments, tmp_path / "said", env=BARE)
    assert status == 1
    assert "set a job token of at least 16 characters" in text
    assert "or give each TLS (--tls; `rallypoint token --tls FOLDER` makes certificates)" in text


def test_a_role_with_another_roles_certificate_does_not_start(tmp_path: Path) -> None:
    certs(tmp_path / "certificates")
    status, text = run_program(
        ["-m", "rallypoint.cli", "server", "--coordinator", "127.0.0.1:1", "--tls", "certificates/worker"],
        tmp_path / "output", env=BARE, cwd=tmp_path,
    )  # fmt: skip
    assert status == 1
    assert "is the certificate of a worker, and this is a server" in text


def test_a_run_with_tls_is_resized_stored_and_ends_with_the_bytes_of_one_without(members: Members) -> None:
    """The launcher's console, `resize` and `snapshot` find the certificates; processes that are added use them too."""
    (members.folder / "train.py").write_text(script(after=WRITES))
    run = members.start("run", "run", "--tls", "auto", "--workers", "1", "--servers", "1", "--folder", "r", "train.py")
    members.until("run", r"(step \d+/)")
    where = read_where(members.folder / "r")
    assert where.tls == str(members.folder / "r" / "tls")
    resize = members.start("resize", "resize", "r", "--workers", "2")
    assert resize.wait(60.0) == 0, members.said("resize")
    assert "done in" in members.said("resize")
    snapshot = members.start("snapshot", "snapshot", "r")
    assert snapshot.wait(60.0) == 0, members.said("snapshot")
    assert "version" in members.said("snapshot")
    run.send_signal(signal.SIGINT)
    assert run.wait(60.0) == 130, members.said("run")

    (members.folder / "train.py").write_text(script(20, after=WRITES))
    for name, options in (("with", ["--tls", "auto"]), ("without", [])):
        program = members.start(name, "run", *options, "--workers", "2", "--folder", name + "-tls", "train.py")
        until(lambda program=program: program.poll() is not None, lambda name=name: members.said(name))  # type: ignore[misc]
        assert program.wait(1.0) == 0, members.said(name)
        members.started[name + "-sha"] = members.started.pop(name)
        (members.folder / "weights-worker0").rename(members.folder / f"weights-{name}")
    assert sha(members, "with") == sha(members, "without")
