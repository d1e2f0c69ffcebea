"""A server that acknowledges everything and holds nothing is found out, and no byte changes."""

from __future__ import annotations

import pytest

from rallypoint.server.parts import Replication
from rallypoint.server.service import ServerService
from rallypoint.testing.simulation.plan import make_plan
from rallypoint.testing.simulation.run import Simulation
from rallypoint.testing.simulation.server import SimulatedServer

SEEDS = [seed for seed in range(300) if make_plan(seed).terms.replication == 2 and make_plan(seed).servers > 2][:12]


@pytest.mark.slow
def test_a_server_that_holds_nothing_of_what_it_acknowledges_never_becomes_primary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest, found = Replication._digest_of_update, []

    def made_up(self: Replication, shard: int, server: str, version: int) -> bytes:
        wrong = (self._shell.machine.me, server) == ("server2", "")
        return b"made up" if wrong else honest(self, shard, server, version)

    monkeypatch.setattr(Replication, "_digest_of_update", made_up)
    monkeypatch.setattr(SimulatedServer, "say", ServerService.say)  # here a backup that is disproved is no failure
    for seed in SEEDS:
        simulation = Simulation(make_plan(seed))
        result = simulation.run()
        said = [text for text in result.outcome.said if "does not hold what" in text]
        found += said
        assert all("server2 is gone: it acknowledged version" in text for text in said)
    assert len(found) >= len(SEEDS) // 2, "in the others it was no backup, or was killed before"
