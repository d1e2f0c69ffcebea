"""What the hosts of a run share with the launcher's machine: the run's folder, the folder of its snapshots.

A host that does not see the run's folder gets a copy of the script's code. Snapshots are another matter: the
coordinator and every server write them, so they need a folder that all of them see, or a URL.
"""

from __future__ import annotations

import io
import secrets
import tarfile
from pathlib import Path

from rallypoint.errors import UsageError
from rallypoint.launch.code.kept import CODE
from rallypoint.launch.engines.remote.hosts import Host, coordinators_host
from rallypoint.launch.engines.remote.messages import Ready, Unpack
from rallypoint.launch.plan import AUTO, Launch


class Sharing:
    """Files in the run's folders by which a host shows that it sees them; a context manager that removes them."""

    def __init__(self, plan: Launch, hosts: tuple[Host, ...]) -> None:
        """Make them. Raises UsageError where a folder cannot be written."""
        self._coordinators = coordinators_host(hosts)
        self._folder = Path(plan.folder).resolve()
        self._snapshots = Path(plan.snapshots).resolve() if plan.snapshots and "://" not in plan.snapshots else None
        self._script, self._makes_certificates = plan.script, plan.tls == AUTO
        name = f".seen-{secrets.token_hex(8)}"
        folders = [self._folder, *([self._snapshots] if self._snapshots else [])]
        self.markers = tuple(str(folder / name) for folder in folders)
        try:
            for marker in self.markers:
                Path(marker).parent.mkdir(parents=True, exist_ok=True)
                Path(marker).touch()
        except OSError as error:
            self.close()
            raise UsageError(f"{error.filename} cannot be written: {error.strerror}") from None

    def close(self) -> None:
        """Remove the files."""
        for marker in self.markers:
            Path(marker).unlink(missing_ok=True)

    def judge(self, host: Host, ready: Ready) -> str | Unpack | None:
        """Return why a host cannot be used, or what it has to unpack, or None."""
        if ready.problem:
            return ready.problem
        sees = dict(zip(self.markers, ready.sees, strict=False))
        writes = host.takes("server") or host == self._coordinators
        if self._snapshots and writes and not sees.get(self.markers[1], False):
            return (
                f"it does not see {self._snapshots}, where the snapshots would be: give --snapshots a URL "
                "(s3://...), or a folder that all hosts share, or none"
            )
        if sees.get(self.markers[0], False):
            return None
        if self._makes_certificates:
            return f"it does not see {self._folder}, where the certificates of --tls auto are: give --tls FOLDER"
        if not self._script:
            return None
        return Unpack(_archive(self._folder))


def _archive(folder: Path) -> bytes:
    """Return the copy of the script and its modules that the run keeps, as a tar archive."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w:gz") as tar:
        tar.add(folder / CODE, CODE)
    return written.getvalue()
