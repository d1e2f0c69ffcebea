"""Members of a job that run on hosts of a netlab, as processes of a `ProcessCluster`."""

from __future__ import annotations

from multiprocessing.connection import Connection

from rallypoint.coordinator.service import CoordinatorService, JoinInfo
from rallypoint.core.cluster.terms import Terms
from rallypoint.server.service import ServerService, run_servers
from support.netlab import Host


def coordinate(pipe: Connection, token: str, host: Host, terms: Terms, folder: str) -> None:
    """Run a coordinator there. Its answers are its address and, at the end, why the job failed, or None."""
    host.enter()
    service = CoordinatorService(terms=terms, token=token, bind=f"{host.address}:0", join_info=JoinInfo(folder=folder))
    service.start()
    pipe.send(("value", service.address))
    failure = service.wait()
    service.close()
    pipe.send(("value", failure))


def serve(pipe: Connection, token: str, host: Host, id: str, address: str) -> None:
    """Run a server there, until the job ends."""
    host.enter()
    run_servers([ServerService(id=id, coordinator=address, token=token, bind=f"{host.address}:0")])
