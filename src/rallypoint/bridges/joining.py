"""How a script with a loop of its own joins a cluster: its rank, the others' address, the job of sums.

Under ``torchrun`` ranks are torchrun's. Under ``rallypoint run`` they are the numbers in the workers' names, and rank 0
gives an address at which torch's processes meet, in the run's folder. `sum_of` makes tensors of a script's own the
vectors that servers add up (fp32 on the CPU), and back.
"""

from __future__ import annotations

import atexit
import contextlib
import copyreg
import hashlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch

from rallypoint.errors import JobAborted, UsageError
from rallypoint.launch import environment
from rallypoint.launch.join import join as join_cluster
from rallypoint.net.places import advertised
from rallypoint.net.tcp import EVERYWHERE, family_of, split_address
from rallypoint.observe.lenient import say
from rallypoint.observe.lines import printable_lines
from rallypoint.own_files import opened, read_file
from rallypoint.worker.collective import Sums
from rallypoint.worker.loop.session import Job

MEETING = "torch-meeting.json"  # in the run's folder: where torch's processes meet
_POLL_S = 0.05
_PATIENCE_S = 120.0
_NOTICED_S = 5.0  # a script whose sums are broken has noticed it by now, if it is going to
_BROKEN_S = 30.0  # after that: time to save something, and to end

_joined: list[Sums] = []


def sums() -> Sums:
    """Join the cluster as one of its workers, once in a process; return what makes the sums.

    Call it before ``torch.distributed.init_process_group``, on all workers. Under ``torchrun`` the script begins anew
    in a process of its own when this is called first. Under ``rallypoint run`` torch's RANK, WORLD_SIZE, MASTER_ADDR
    and MASTER_PORT are set. The job ends when all scripts have ended, or have called `Sums.finish`.

    Raises UsageError if neither launcher has started this process, JobAborted when the job ends before it begins.
    """
    if _joined:
        return _joined[0]
    if not os.environ.get(environment.COORDINATOR) and "TORCHELASTIC_RUN_ID" not in os.environ:
        raise UsageError(
            "the sums are made by servers, and there are none: start the script with `rallypoint run --workers 2 "
            f"--servers 2 {Path(sys.argv[0]).name}`, or with torchrun"
        )
    if int(os.environ.get(environment.RANKS) or 1) > 1:
        raise UsageError("a script with a loop of its own has one process for each worker: leave --ranks out")
    job = join_cluster()
    assert isinstance(job, Job)
    rank, world = _place(job, os.environ)
    made = Sums(job, rank=rank, world=world)
    _joined.append(made)
    os.environ[environment.SUMS] = str(os.getpid())
    _end_with_the_script(made)
    return made


def is_child() -> bool:
    """True in a process that one which has joined has started, such as a data loader's: it imports the script too."""
    return os.environ.get(environment.SUMS, str(os.getpid())) != str(os.getpid())


def use(made: Sums) -> None:
    """Make `sums` return these, in a process that has joined a cluster in another way."""
    _joined[:] = [made]


def _place(job: Job, env: MutableMapping[str, str]) -> tuple[int, int]:
    """The rank of this process and the size of the world; sets what torch needs in `env`, if nobody has."""
    if "RANK" in env and "WORLD_SIZE" in env:
        return int(env["RANK"]), int(env["WORLD_SIZE"])
    number, world = re.search(r"(\d+)$", job.id), env.get(environment.WORKERS, "")
    if number is None or not world.isdecimal() or not int(number[0]) < int(world):
        raise UsageError(
            f"which rank {job.id} has is not known: it was started in the place of another one, or by hand. The world "
            "of such a script is fixed: start all of it again, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )
    rank = int(number[0])
    # What tells this run from earlier ones in its folder, whose coordinator may have had the same address
    digest = hashlib.blake2b(env.get(environment.TOKEN, "").encode(), digest_size=16)  # a launcher makes a new token
    coordinator = env[environment.COORDINATOR]
    host, port = _meeting(job, rank, coordinator, f"{coordinator} {digest.hexdigest()}")
    env.update(RANK=str(rank), WORLD_SIZE=world, MASTER_ADDR=host, MASTER_PORT=str(port))
    env.setdefault("LOCAL_RANK", "0")
    return rank, int(world)


def _meeting(job: Job, rank: int, coordinator: str, run: str) -> tuple[str, int]:
    """Where torch's processes meet: rank 0 chooses a port, and the others read it in the run's folder."""
    file = Path(job.welcome.folder or ".") / MEETING
    if rank == 0:
        host = split_address(advertised(f"{EVERYWHERE}:0", towards=coordinator))[0]
        with socket.create_server((host, 0), family=family_of(host)[0]) as free:
            port = free.getsockname()[1]
        with opened(file.parent, make=True) as folder:
            folder.write(MEETING, json.dumps({"job": run, "host": host, "port": port}).encode(), mode=0o644)
        return host, port
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        found = json.loads(read_file(file)) if file.exists() else {}
        if found.get("job") == run:
            return str(found["host"]), int(found["port"])
        time.sleep(_POLL_S)
    raise UsageError(
        f"rank 0 has not said in {file} where torch's processes meet, for {_PATIENCE_S:.0f} s: does every machine see "
        "that folder? Else set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torch wants them"
    )


def _end_who_waits(made: Sums, over: threading.Event, error: JobAborted) -> None:
    """No sum can be made any more: end this process, unless its script ends by itself (`over` is set). A script hears
    of it at its next sum. But one that waits in a collective over Gloo for a worker that is paused, or cut off, asks
    for none, and nothing wakes it: Gloo waits half an hour. A script that does something else, such as to save what it
    has, is left alone."""

    def wait() -> None:
        if over.wait(_NOTICED_S):
            return
        sentence = printable_lines(str(error))
        say(f"{sentence} (this script is ended in {_BROKEN_S:.0f} s, unless it ends by itself)", error=True)
        while not (ended := over.wait(_BROKEN_S)) and not _in_collective():
            pass
        if not ended:
            made.fail(error)
            os._exit(1)

    threading.Thread(target=wait, name="sums-broken", daemon=True).start()


def _in_collective() -> bool:
    """Whether the main thread is inside of torch.distributed."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and not frame.f_globals.get("__name__", "").startswith("torch.distributed"):
        frame = frame.f_back
    return frame is not None


def _end_with_the_script(made: Sums) -> None:
    """When the script ends, so do its sums: after an error as a failure of the job, else with all other scripts."""
    errors: list[BaseException] = []
    over = threading.Event()
    before: Callable[[type[BaseException], BaseException, TracebackType | None], object] = sys.excepthook

    def noted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        over.set()
        told = made.told(error)
        errors.append(told)
        before(type(told), told, trace)
        if isinstance(told, JobAborted):
            tell(told)

    def tell(error: JobAborted) -> None:  # `rallypoint run` says it too; torchrun does not
        say(f"error: {printable_lines(str(error))}", error=True)

    def end() -> None:
        over.set()
        if errors:
            made.fail(errors[0])
            return
        # End Gloo's connections, as the process's end would: else others wait in a collective for this script, while it
        # waits for theirs to end. (They stay open while the script holds a model that uses them.)
        with contextlib.suppress(Exception):
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
        try:
            made.finish()
        except JobAborted as error:  # another script is gone, or has failed
            tell(error)

    made.reducer.when_broken = partial(_end_who_waits, made, over)
    sys.excepthook = noted
    atexit.register(end)  # it runs before what `join` has registered


# A model with DDP's hook holds the hook's state: `torch.save` and `copy.deepcopy` of it give the process's own sums.
copyreg.pickle(Sums, lambda made: (sums, ()))


SUMMED = (torch.float32, torch.bfloat16, torch.float16)
T = TypeVar("T")


class SumPart:
    """One tensor of a sum: `given` is what this rank adds, `into` gets the words `keeps` of the sum times `factor`.

    `before` multiplies what this rank adds. Numbers of 16 bits are added up in fp32, and the result is rounded once.
    """

    def __init__(
        self, given: torch.Tensor, into: torch.Tensor, *, keeps: range | None = None, factor: float = 1.0,
        before: float | torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self._into, self._factor = into.detach(), factor  # of a parameter: gradients are on, on the thread of the sums
        words = given.detach().reshape(-1).to("cpu", torch.float32)
        self._words = words if before is None else words * before
        self._keeps = range(words.numel()) if keeps is None else keeps
        here = into.is_contiguous() and into.dtype is torch.float32 and into.device.type == "cpu"
        self._target = (
            into.detach().view(-1) if here else torch.empty(len(self._keeps), dtype=torch.float32, device="cpu")
        )
        self._in_place = here

    def ask(self, made: Sums, then: Callable[[BaseException | None], None]) -> None:
        """Ask for the sum. `then` is called when `into` has it, or with the error."""

        def ended(error: BaseException | None) -> None:
            try:
                if error is None:
                    self._finish()
            except Exception as fault:  # it belongs to who waits for this sum
                error = fault
            then(error)

        made.reducer.sum(self._words, self._target, self._keeps).then(ended)

    def _finish(self) -> None:
        if self._factor != 1.0:
            self._target.mul_(self._factor)
        if not self._in_place:
            self._into.copy_(self._target.view(self._into.shape))


def sum_of(made: Sums, parts: Sequence[SumPart], result: T, device: torch.device) -> torch.futures.Future[T]:
    """Ask for the sums of all `parts`; the future has `result` when all are there, or the first error.

    The error is one for C++ too, as a RuntimeError with the error's sentence in it: DDP's reducer looks at the future.
    (`Future.set_exception` makes an error for Python only. C++ takes the exception for the result, and crashes.)
    """
    over: torch.futures.Future[None] = torch.futures.Future(devices=None if device.type == "cpu" else [device])
    lock, left, errors = threading.Lock(), [len(parts)], list[BaseException]()

    def outcome(_: torch.futures.Future[None]) -> T:
        if errors:
            raise errors[0]
        return result

    def ended(error: BaseException | None) -> None:
        if error is not None:
            made.failed = made.failed or error
        with lock:
            left[0] -= 1
            errors.extend([] if error is None else [error])
            last = left[0] == 0
        if last:  # on a thread of its own: what a script has hung on the future may wait for the next sum
            try:
                threading.Thread(target=over.set_result, args=(None,), name="sums-result", daemon=True).start()
            except RuntimeError as fault:  # no more threads: else the script would wait for ever
                made.failed = made.failed or fault
                errors.insert(0, fault)
                over.set_result(None)

    future = over.then(outcome)
    for part in parts:
        part.ask(made, ended)
    if not parts:
        over.set_result(None)
    return future
