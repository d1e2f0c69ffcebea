"""Bits that flip in servers' memory: how many audits of servers find, how soon, and what the audits cost.

    python benchmarks/audits_servers.py [--flips 25] [--json FILE]

For each N it plays so many short jobs in this process: one worker, two servers that hold each shard, snapshots. In
each, one bit flips at a seeded place (shard, version, array, word, bit, primary or backup) while the shard is at rest.
The table says how many were found, how many versions later (0: before the next update), how many made the job go back
to a snapshot, and how many runs ended with the bytes of an undisturbed one. Then it measures what audit_servers=100
costs: two digests of a shard's state every 100 versions, against the shard's update itself.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import random
import statistics
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

import rallypoint as rp
from rallypoint.codec.base.scratch import Scratch
from rallypoint.config import JobConfig
from rallypoint.coordinator.service import CoordinatorService, JoinInfo
from rallypoint.core.cluster.terms import Terms
from rallypoint.core.layout import TensorSpec, build_layout
from rallypoint.core.shard.effects import Apply
from rallypoint.net.auditing.messages import ServerMismatch
from rallypoint.net.handshake import Identity
from rallypoint.net.inproc import InprocTransport
from rallypoint.net.member import CoordinatorLink, Handlers
from rallypoint.net.pool import BufferPool
from rallypoint.server.reducer.audits import ServerAudits
from rallypoint.server.shards.owned import OwnedShard
from rallypoint.testing.contracts.beside import until
from rallypoint.testing.flips import Flip, FlippingServer
from rallypoint.worker.loop.session import Job
from rallypoint.worker.tensors import weights_hash

PERIODS = (1, 10, 100)
STEPS, READY = 30, 4
SHARDS = 5  # of the model below, about
ROUNDS = 200
DATA = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 240).view(40, 6))


def play(every: int, flip: Flip | None, folder: str) -> dict[str, Any]:
    """One job, with this flip in one of its two servers. Returns its weights' hash, and what was found."""
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
    transport, flipped = InprocTransport(), list[Flip]()
    terms = Terms(servers=2, replication=2, snapshots=True, snapshot_steps=5, snapshot_seconds=0.0)
    coordinator = CoordinatorService(
        terms=terms, bind="coordinator:0", transport=transport, join_info=JoinInfo(snapshots=folder)
    )
    coordinator.start()
    eyes = CoordinatorLink(
        transport=transport, address=coordinator.address, me=Identity("observer", "eyes"),
        handlers=Handlers(heard.put, heard.put),
    )  # fmt: skip
    eyes.start()
    planned: list[Flip] = [] if flip is None else [flip]

    def told(done: Flip) -> None:
        flipped.append(done)
        planned.clear()  # one bit of one of the two

    servers = [
        FlippingServer(planned, told, id=f"server{i}", coordinator=coordinator.address, bind="server:0",
                       transport=transport)
        for i in range(2)
    ]  # fmt: skip
    for server in servers:
        server.start()
    hashes = list[str]()

    def train() -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
        with Job(id="worker0", coordinator=coordinator.address, transport=transport) as job:
            for micro in job.train(
                model, DATA, replicas=2, batch=5, steps=STEPS, shard_bytes=256, optimizer=rp.AdamW(lr=0.01),
                audit_servers=every,
            ):  # fmt: skip
                with micro:
                    if micro.step == READY:
                        until(lambda: coordinator._shell.machine.exposed == 0)
                    micro.backward(model(micro.batch[0]).square().mean())
        hashes.append(weights_hash(model))

    worker = threading.Thread(target=train, daemon=True)
    worker.start()
    worker.join(60.0)
    for server in servers:
        server.close()
    coordinator.close()
    eyes.close()
    said = [heard.get() for _ in range(heard.qsize())]
    found = [message for message in said if isinstance(message, ServerMismatch)]
    return {
        "hash": hashes[0] if hashes else "", "flipped": bool(flipped), "found": bool(found),
        "after": found[0].version - flip.version if found and flip is not None else None,
        "back": any("going on from snapshot" in getattr(message, "text", "") for message in said),
    }  # fmt: skip


def flip_of(seed: int) -> Flip:
    """The flip of a seed."""
    rng = random.Random(seed)
    return Flip(
        shard=rng.randrange(SHARDS), version=rng.randint(READY + 2, STEPS - 5), array=rng.randrange(3),
        word=rng.randrange(64), bit=rng.randrange(32), primary=rng.random() < 0.5,
    )  # fmt: skip


def cost() -> tuple[float, float]:
    """Microseconds, medians: AdamW's update of a shard of 1 MiB, and one digest of its state."""
    torch.set_num_threads(1)  # as a server has
    config = JobConfig()
    place = build_layout([TensorSpec("w", (1 << 18,), "float32", 0)], 1 << 20).shards[0]
    pool = BufferPool(place.words)
    shard = OwnedShard(place, config, pool, Scratch())
    shard.install(pool.take())
    audits, updates, digests = ServerAudits(100, {0: shard}), list[float](), list[float]()
    for version in range(1, ROUNDS + 1):
        gradient = pool.take()
        gradient.tensor.normal_()
        shard.take(gradient, 1.0)
        begun = time.perf_counter()
        shard.apply(Apply(version, version - 1, 1.0, version - 1))
        updated = time.perf_counter()
        audits._digest(0, version)
        digests.append(time.perf_counter() - updated)
        updates.append(updated - begun)
    return 1e6 * statistics.median(updates), 1e6 * statistics.median(digests)


def main(
    flips: Annotated[int, typer.Option(min=1, help="Bits that flip, for each N.")] = 25,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures there.")] = None,
) -> None:
    """Plant flips, and measure."""
    logging.disable(logging.CRITICAL)
    results = []
    print(f"{'N':>5} {'planted':>8} {'found':>6} {'versions until found':>22} {'went back':>10} {'same bytes':>11}")
    for every in PERIODS:
        with TemporaryDirectory() as folder:
            expected = play(every, None, folder)["hash"]
        runs = []
        for seed in range(flips):
            with TemporaryDirectory() as folder:
                runs.append(play(every, flip_of(seed), folder))
        done = [run for run in runs if run["flipped"]]
        after = [run["after"] for run in done if run["found"]]
        row = {
            "every": every, "planted": len(done), "found": len(after), "after": sorted(after),
            "back": sum(run["back"] for run in done), "same": sum(run["hash"] == expected for run in done),
        }  # fmt: skip
        results.append(row)
        until_found = f"{statistics.median(after):g} (most {max(after)})" if after else "-"
        print(f"{every:>5} {row['planted']:>8} {row['found']:>6} {until_found:>22} {row['back']:>10} {row['same']:>11}")
    update, digest = cost()
    share = 2 * digest / 100 / update
    print(f"AdamW's update of a shard of 1 MiB takes {update:.0f} us, a digest of its state {digest:.0f} us: with "
          f"audit_servers=100 that is {100 * share:.2f} % of the update")  # fmt: skip
    if json_file is not None:
        machine = {"cores": os.cpu_count(), "torch": torch.__version__, "python": sys.version.split()[0]}
        figures = {"machine": machine, "results": results, "update_us": update, "digest_us": digest, "share": share}
        json_file.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    typer.run(main)
