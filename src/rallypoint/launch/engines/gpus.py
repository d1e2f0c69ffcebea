"""Which of a machine's GPUs a worker sees: one, or as many as it has ranks, and none of another worker's."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DRIVER = Path("/proc/driver/nvidia/gpus")


class GpuShare:
    """A worker's share of the GPUs of its machine, held while this process lives (or until `close`).

    Workers of one job on one machine find each other by names of sockets (Linux's abstract ones: no files, and the
    name is free as soon as the process has died). Example: 8 GPUs and 4 ranks: the first worker sees "0,1,2,3", the
    second "4,5,6,7".

    Attributes:
        visible: for CUDA_VISIBLE_DEVICES; None: leave it as it is, since there are no GPUs, or fewer than ranks.
        shared: all shares are taken, so this one is another worker's too.
    """

    def __init__(self, ranks: int, job: str, devices: Sequence[str]) -> None:
        """`job` is any text that is the same for the workers of one job; `devices` are those of `devices_of`."""
        self.visible: str | None = None
        self.shared = False
        self._name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        shares = shares_of(devices, ranks)
        if not shares:
            return
        place = hashlib.sha256(f"{job} {ranks} {','.join(devices)}".encode()).hexdigest()[:32]
        for number, share in enumerate(shares):
            try:
                self._name.bind(f"\0rallypoint-{os.getuid()}-{place}-{number}")
            except OSError:  # another worker has it
                continue
            self.visible = ",".join(share)
            return
        self.visible, self.shared = ",".join(shares[0]), True

    def close(self) -> None:
        """Give the share back."""
        self._name.close()


def shares_of(devices: Sequence[str], ranks: int) -> list[list[str]]:
    """Return the parts of `devices` that workers of so many ranks get; GPUs that are left over belong to none."""
    return [list(devices[at : at + ranks]) for at in range(0, len(devices) - ranks + 1, ranks)]


def least_used(devices: Sequence[str], used: Sequence[str | None]) -> str:
    """Return the first of the devices that is least often among `used`."""
    return min(devices, key=used.count)


def devices_of(environment: Mapping[str, str], driver: Path = _DRIVER) -> list[str]:
    """Return the GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them; without it, those of the driver."""
    if (text := environment.get(VISIBLE)) is not None:
        return [one.strip() for one in text.split(",") if one.strip()]
    return [str(number) for number in range(len(list(driver.glob("*"))))]
