"""Three sites with 50 ms between them: one is cut off, the others go on; it comes back, and the job ends well."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

import rallypoint as rp
from lab_members import coordinate, serve
from rallypoint.codec.spec import Int8
from rallypoint.core.cluster.terms import Terms
from rallypoint.testing.processes import ProcessCluster
from rallypoint.worker.loop.session import Job
from rallypoint.worker.tensors import weights_hash
from support.beside import until
from support.netlab import Host, Netlab

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.programs]

SITES, LOST = 3, 2
STEPS, AT, AWAY_TO, BACK_TO = 160, 24, 64, 120  # steps: all, when a site is lost, until when, and until when all go on
PATIENCE_S = 200.0
TERMS = Terms(workers_start=SITES, workers_max=SITES, servers=SITES, replication=2, heartbeat=1.0, snapshots=False)


def _work(pipe: Connection, token: str, host: Host, id: str, address: str, home: Path) -> None:
    host.enter()
    with Job(id=id, coordinator=address, token=token) as job:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 60), torch.nn.Tanh(), torch.nn.Linear(60, 3))
        data = torch.utils.data.TensorDataset(torch.randn(50, 6), torch.randn(50, 3))
        sync = rp.LocalSteps(8, fragments=2, delay=2)
        run = job.train(
            model, data, replicas=SITES, batch=4, steps=STEPS, network=rp.Network(shard_bytes=512), sync=sync,
            codec=Int8(), down=Int8()
        )
        with (home / f"{id}.steps").open("w", buffering=1) as log:
            for micro in run:
                with micro:
                    while micro.step >= int((home / "gate").read_text()):
                        time.sleep(0.005)
                        model[0].weight.sum()
                    print(time.monotonic(), micro.step, file=log)
                    time.sleep(0.02)
                    micro.backward(torch.nn.functional.mse_loss(model(micro.batch[0]), micro.batch[1]))
        pipe.send(("value", weights_hash(model)))


class Sites:
    """What the test sees of the run."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def open(self, step: int) -> None:
        """Let the workers come as far as this step."""
        (self.home / "gate.partial").write_text(str(step))
        (self.home / "gate.partial").replace(self.home / "gate")

    def begun(self, site: int) -> list[tuple[float, int]]:
        path = self.home / f"worker{site}.steps"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [(float(when), int(step)) for when, step in (line.split() for line in lines if line.endswith("\n"))]

    def until(self, happened: Callable[[], bool]) -> None:
        until(happened, lambda: [self.begun(site)[-1:] for site in range(SITES)], within=PATIENCE_S, pause=0.02)

    def until_step(self, step: int, *sites: int) -> None:
        self.until(lambda: all(any(s >= step for _, s in self.begun(site)) for site in sites))

    def pause(self, site: int, first: float, last: float) -> float:
        """The longest time without the beginning of a step of this site, between these moments."""
        times = [when for when, _ in self.begun(site) if first <= when <= last]
        return max((after - before for before, after in itertools.pairwise(times)), default=last - first)


def test_a_site_that_is_cut_off_stops_no_other_and_comes_back_by_itself(tmp_path: Path) -> None:
    """Rounds of 4 steps are staggered, with int8 both ways. Each site has a worker and a server."""
    sites = Sites(tmp_path)
    sites.open(AT)
    with (
        Netlab(hosts=7, racks=(3, 2, 2), uplink_mbit=100.0, uplink_delay=0.025) as lab,
        ProcessCluster(workers=SITES, servers=SITES) as cluster,
    ):
        places = [lab.rack(site) for site in range(SITES)]
        coordinating = cluster.start(coordinate, places[0][2], TERMS, str(tmp_path))
        address = str(cluster.answer(coordinating))
        for site, place in enumerate(places):
            cluster.start(serve, place[1], f"server{site}", address)
        workers = [
            cluster.start(_work, place[0], f"worker{site}", address, tmp_path) for site, place in enumerate(places)
        ]
        sites.until_step(AT - 1, *range(SITES))

        cut = time.monotonic()
        lab.cut_rack(LOST)
        sites.open(AWAY_TO)
        sites.until_step(AWAY_TO - 1, 0, 1)  # they finish rounds without the third
        gone = time.monotonic()
        assert max(step for _, step in sites.begun(LOST)) < AWAY_TO - 1, "it was not cut off"

        lab.heal_rack(LOST)
        sites.open(BACK_TO)
        sites.until(lambda: any(when > gone and step >= AWAY_TO for when, step in sites.begun(LOST)))
        sites.open(STEPS)
        assert cluster.answer(coordinating) is None
        hashes = {cluster.answer(worker) for worker in workers}
        for site in (0, 1):  # for the docs: pytest -rP
            print(f"site {site}: no step begun for at most {sites.pause(site, cut, gone):.2f} s while one was away")
    assert len(hashes) == 1
