"""Throw many mutated frames at jobs of every policy, in every role, and print what came of it.

    python tests/net/fuzz_long.py --frames 1000000 --seed 1 --minutes 60
    python tests/net/fuzz_long.py --frames 100000 --seed 1 --tls                # all links with TLS, and attacks on it

Each round attacks each policy in each way with its share of frames, and prints a line; so a run that is ended early has
attacked everything about equally. At the end it prints the table, and exits with 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import torch
from fuzz_campaign import AT_AN_AGGREGATOR, ATTACKS, OUTSIDE, WHOLE_JOBS, Campaign
from fuzz_decoders import Decoders
from fuzz_jobs import AGGREGATED, POLICIES

from rallypoint.net.certificates import make_certificates
from rallypoint.server import member

ROUNDS = 10
_OF_A_JOB = 0.003  # the share of each attack that needs a whole job for a few dozen frames
_BEFORE = 0.08  # the share of each attack in which every frame needs a connection of its own


def frames_of(attack: str, frames: int) -> int:
    """How many of a policy's `frames` are thrown in this way."""
    fixed = dict.fromkeys(WHOLE_JOBS, _OF_A_JOB) | dict.fromkeys(("coordinator before", "server before"), _BEFORE)
    share = fixed.get(attack, (1 - sum(fixed.values())) / (len(ATTACKS) - len(fixed)))
    return max(1, int(frames * share))


def ways_of(policy: str, frames: int) -> dict[str, int]:
    """How many of its `frames` are thrown in each way at a job of this policy."""
    if policy != AGGREGATED:
        return {which: frames_of(which, frames) for which in ATTACKS}
    ways = (*OUTSIDE, *AT_AN_AGGREGATOR)
    before = {which: max(1, int(frames * _BEFORE)) for which in ways if which.endswith(" before")}
    return before | {
        which: max(1, (frames - sum(before.values())) // (len(ways) - len(before)))
        for which in ways if which not in before
    }  # fmt: skip


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no further policy's attacks after so long")
    parser.add_argument("--decoders", type=int, default=1_000_000, help="frames for the decoders alone")
    parser.add_argument("--tls", action="store_true", help="with TLS on all links, and attacks on its handshake")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        if options.tls:
            make_certificates(Path(folder))
        return attack(options, Path(folder) if options.tls else None)


def attack(options: argparse.Namespace, certificates: Path | None) -> int:
    """Attack as the options say; with TLS if there are `certificates`. Returns the exit status."""
    torch.set_num_threads(1)
    member.VIEW_TIMEOUT_S = 0.5  # a frame of a view that never comes would hold its connection for a minute
    campaigns = [Campaign(policy, options.seed, certificates) for policy in (*POLICIES, AGGREGATED)]
    for campaign in campaigns:
        campaign.record()
        campaign.attack({"coordinator before": 100})  # what is loaded at the first use is no growth
    began, cpu, process = time.monotonic(), time.process_time(), psutil.Process()
    first = resident = _resident(process)
    for number in range(ROUNDS):
        for campaign in campaigns:
            if time.monotonic() - began > 60 * options.minutes:
                break
            share = options.frames // ROUNDS // len(campaigns)
            campaign.attack(ways_of(campaign.name, share))
            resident = _resident(process)
            thrown = sum(sum(one.thrown.values()) for one in campaigns)
            took = time.monotonic() - began
            print(
                f"round {number}: {campaign.name}: {thrown} frames, {took:.0f} s, {thrown / took:.0f} a second, "
                f"{resident / 1e6:.0f} MB resident, {sum(len(one.faults) for one in campaigns)} faults", flush=True,
            )  # fmt: skip
            _print_faults(campaign)
    thrown = _table(campaigns)
    print(
        f"{thrown} frames in {time.monotonic() - began:.0f} s ({time.process_time() - cpu:.0f} s of one core); "
        f"resident {first / 1e6:.0f} MB before, {resident / 1e6:.0f} MB after"
    )
    faults = [fault for campaign in campaigns for fault in campaign.faults]
    decoders = [Decoders(campaign, options.seed) for campaign in campaigns]
    for one in decoders:
        one.attack(options.decoders // len(decoders))
        faults += one.faults
    print(f"beside these, {sum(one.thrown.total() for one in decoders)} frames for the decoders alone")
    print("\n".join([f"{len(faults)} faults", *faults]))
    return 1 if faults else 0


_printed: Counter[str] = Counter()


def _print_faults(campaign: Campaign) -> None:
    for fault in campaign.faults[_printed[campaign.name] :]:
        print("  FAULT", fault[:3000], flush=True)
    _printed[campaign.name] = len(campaign.faults)


def _resident(process: psutil.Process) -> int:
    gc.collect()
    return int(process.memory_info().rss)


def _table(campaigns: list[Campaign]) -> int:
    """Print frames by attack and policy. Returns how many there are in all."""
    print(f"{'':34}" + "".join(f"{campaign.name:>12}" for campaign in campaigns) + f"{'all':>12}")
    for which in (*ATTACKS, *AT_AN_AGGREGATOR):
        row = [campaign.thrown[which] for campaign in campaigns]
        print(f"{which:34}" + "".join(f"{count:12}" for count in (*row, sum(row))))
    columns = [sum(campaign.thrown.values()) for campaign in campaigns]
    print(f"{'all':34}" + "".join(f"{count:12}" for count in (*columns, sum(columns))))
    ends = sum((campaign.ends for campaign in campaigns), Counter[str]())
    print("jobs with possessed members: " + "; ".join(f"{how}: {count}" for how, count in sorted(ends.items())))
    return sum(columns)


if __name__ == "__main__":
    sys.exit(main())
