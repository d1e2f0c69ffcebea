"""torch's own `DistributedTest` cases, one after the other: `torch_cases.py backend|hook [NAME ...]` in each rank.

torch runs each case in new processes; here a rank stays, and each case gets a new process group. With `hook` the group
is Gloo's, and every DDP model of all ranks gets the hook before its first forward pass, unless the case gives it one.
Run it in an empty folder: ranks meet in files there. Each rank prints what its cases have come to. The first failure
ends the script, and with it the job.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import traceback
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from rallypoint.bridges import c10d, joining
from rallypoint.bridges.ddp import hook
from rallypoint.bridges.joining import SUMMED

MADE = joining.sums()
WHAT, *NAMES = sys.argv[1:]
BACKEND = c10d.NAME if WHAT == "backend" else "gloo"
FOLDER = Path.cwd() / "cases"
FOLDER.mkdir(exist_ok=True)
torch.manual_seed(0)  # the module makes models when it is imported, once for all of torch's ranks
os.environ.update(BACKEND="gloo", TEMP_DIR=str(FOLDER))  # the cases' module reads them when it is imported

from torch.testing._internal import common_distributed  # noqa: E402
from torch.testing._internal.distributed import distributed_test  # noqa: E402

SKIPPED = {skip.exit_code: skip.message for skip in common_distributed.TEST_SKIPS.values()}
OF_WHAT = re.compile("" if WHAT == "backend" else "ddp|DDP|DistributedDataParallel|no_sync|static_graph")
BY_NAME = ("test_get_backend", "test_monitored_barrier")  # torch asks whether the backend's name is gloo
MEETING = dist.FileStore(str(FOLDER / "barriers"), MADE.world)
MEETINGS = itertools.count()


def meet() -> None:
    """Wait for the other ranks, whatever has become of the process group."""
    number = next(MEETINGS)
    if MEETING.add(f"come {number}", 1) == MADE.world:
        MEETING.set(f"all {number}", "")
    MEETING.wait([f"all {number}"])


class Cases(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """All cases; `rank` is that of this process, so a case's method runs the case itself."""

    def _barrier(self, *args: Any, **kwargs: Any) -> None:
        """torch's counts processes, of which each case has new ones there, and waits 10 s."""
        meet()


def give_the_hook() -> None:
    """Give each DDP model of all ranks the hook in its first forward pass, unless the case has given it one."""
    register, forward = DistributedDataParallel.register_comm_hook, DistributedDataParallel.forward

    def registered(model: Any, state: Any, one: Any) -> None:
        model.has_hook = True
        register(model, state, one)

    def forwarded(model: Any, *given: Any, **named: Any) -> Any:
        floats = all(p.dtype in SUMMED for p in model.parameters() if p.requires_grad)
        if not hasattr(model, "has_hook") and dist.get_world_size(model.process_group) == MADE.world and floats:
            model.register_comm_hook(MADE, hook)
        return forward(model, *given, **named)

    setattr(DistributedDataParallel, "register_comm_hook", registered)  # noqa: B010
    setattr(DistributedDataParallel, "forward", forwarded)  # noqa: B010


def outcome(name: str) -> str:
    """Run one case: "passed", or why it was skipped."""
    if getattr(method := getattr(Cases, name), "__unittest_skip__", False):
        return str(method.__unittest_skip_why__)
    if WHAT == "backend" and name.startswith(BY_NAME):
        return "for the name gloo"
    case = Cases(name)
    case.rank = MADE.rank
    torch.manual_seed(0)
    dist.init_process_group(
        BACKEND, init_method=f"file://{FOLDER / name}", rank=MADE.rank, world_size=MADE.world,
        timeout=timedelta(seconds=distributed_test.CUSTOM_PG_TIMEOUT.get(name, 60)),
    )  # fmt: skip
    try:
        meet()
        getattr(case, name)()
        meet()
    except unittest.SkipTest as skip:
        return str(skip)
    except NameError as error:
        if error.name != "torchvision":  # a case that does not ask whether it is there
            raise
        return "no torchvision"
    except SystemExit as end:
        if end.code not in SKIPPED:
            raise
        return SKIPPED[end.code]
    finally:
        dist.destroy_process_group()
    return "passed"


def main() -> None:
    (FOLDER / "test_dir").mkdir(exist_ok=True)  # a case writes there
    if WHAT == "hook":
        give_the_hook()
    for name in NAMES or filter(OF_WHAT.search, unittest.defaultTestLoader.getTestCaseNames(Cases)):
        before = MADE.reducer.made
        try:
            said = outcome(name)
        except BaseException:
            traceback.print_exc()
            print(f"{name}: FAILED", flush=True)
            os._exit(1)
        print(f"{name}: {said} ({MADE.reducer.made - before} sums)", flush=True)


main()
