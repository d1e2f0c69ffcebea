"""Which way large payloads go: by the network card into memory, or through the stream like all else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from rallypoint.errors import UsageError, to_install
from rallypoint.net.rdma.agent import MODULES, installed

TCP, NIXL, AUTO = "tcp", "nixl", "auto"
TRANSPORTS = (TCP, NIXL, AUTO)
DEVICES = Path("/sys/class/infiniband")  # Linux lists InfiniBand, RoCE and other RDMA cards here


def rdma_devices(folder: Path = DEVICES) -> tuple[str, ...]:
    """The names of this machine's RDMA devices, as ("mlx5_0",)."""
    try:
        return tuple(sorted(entry.name for entry in folder.iterdir()))
    except OSError:
        return ()


def chosen(word: str, *, secure: bool, devices: Path = DEVICES) -> str:
    """TCP or NIXL, for what a person has asked for: TCP, NIXL, or AUTO (NIXL where the machine has a device for it).

    UsageError for another word, and where NIXL is asked for and the package is missing, or links have TLS.
    """
    if word not in TRANSPORTS:
        raise UsageError(f"there is no transport '{word}': choose of {', '.join(TRANSPORTS)}")
    if word == NIXL and secure:
        raise UsageError("--transport nixl does not encrypt, and --tls asks for that: choose one of the two")
    if word == NIXL and not installed():
        raise UsageError(f"--transport nixl needs NIXL ({', '.join(MODULES[:2])}): {to_install('rdma')}")
    if word == AUTO:
        return NIXL if rdma_devices(devices) and installed() and not secure else TCP
    return word


def environment_of(devices: Path = DEVICES, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables with which UCX is to start, where nobody has set them.

    UCX asks nobody who connects to it for a proof, and lets who has connected write any memory of the process. So it
    stays off the machine's ordinary networks: with RDMA devices it uses them, and no TCP. Without, it uses shared
    memory and loopback, for trying it out. Whoever sets UCX_TLS or UCX_NET_DEVICES says what is right instead.
    """
    given = os.environ if given is None else given
    # Where there is no device for it, UCX's part for InfiniBand only brings a libnl that crashes at the process's end.
    without = {"UCX_NET_DEVICES": "lo", "UCX_MODULES": "^ib"}
    wanted = {"UCX_TLS": "^tcp"} if rdma_devices(devices) else without
    return {name: value for name, value in wanted.items() if name not in given}
