"""On which machine a process is started. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rallypoint.launch.engines.remote.hosts import Host, coordinators_host


def place(
    role: str, hosts: Sequence[Host], up: Collection[Host], running: Mapping[Host, Sequence[str]]
) -> Host | None:  # fmt: skip
    """Return the host for another process of this role; None if no host takes the role.

    The coordinator has a host of its own choice (`coordinators_host`): members look for it at one address. Of the
    others, each goes to the host with the fewest of its role, then with the fewest of all, each divided by the host's
    slots. Hosts that are not `up` are used only if no other takes the role. `running`: the roles that run on each.
    """
    if role == "coordinator":
        return coordinators_host(tuple(hosts))
    takers = [host for host in hosts if host.takes(role)]
    candidates = [host for host in takers if host in up] or takers

    def load(host: Host) -> tuple[float, float]:
        roles = [other for other in running.get(host, ()) if other != "coordinator"]
        return roles.count(role) / host.slots, len(roles) / host.slots

    return min(candidates, key=load, default=None)
