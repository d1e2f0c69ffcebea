"""Leak police: a test that leaves a thread, a child process, a socket or an environment variable behind fails."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import hypothesis
import psutil
import pytest
import torch

from support import netlab

GRACE_S = 2.0  # for what is on its way out when a test ends
_EIGHTH = os.environ.get("EIGHTH", "")
_OURS_TO_KEEP = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")  # one per session, by design
_MAY_CHANGE = {
    "PYTEST_CURRENT_TEST",  # pytest's own
    "TORCHINDUCTOR_CACHE_DIR",  # set by torch's first optimizer
    "KMP_DUPLICATE_LIB_OK",  # these two by importing scikit-learn
    "KMP_INIT_AT_FORK",
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # by importing Lightning
}


# The same examples each time. Hypothesis fails one that takes 200 ms: beside other tests on two cores any may.
hypothesis.settings.register_profile("all", deadline=None, derandomize=True)
hypothesis.settings.register_profile("not slow", deadline=None, derandomize=True, max_examples=25)


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("not slow" if "not slow" in config.option.markexpr else "all")
    # An exception that ends a thread unseen is a failure of the test that ran it.
    config.addinivalue_line("filterwarnings", "error::pytest.PytestUnhandledThreadExceptionWarning")
    # A shell that starts the tests in the background has them ignore Ctrl-C and Ctrl-\, and so all that they start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    gc.disable()  # until the tests are collected: 16,000 of them, and nothing is garbage


def pytest_collection_finish() -> None:
    """What was collected stays to the end: the garbage collector need not look at it after each test."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`@pytest.mark.some("a*", "b")`: only the cases whose ids match are in `make test`; the others are slow.

    With EIGHTH=n in the environment, only every eighth of the slow tests is run: 0 to 7 together are all.
    """
    for item in items:
        some = item.get_closest_marker("some")
        if some is not None and not any(fnmatch(item.callspec.id, pattern) for pattern in some.args):  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.slow)
    if _EIGHTH:
        slow = [item for item in items if item.get_closest_marker("slow") is not None]
        left_out = {item for number, item in enumerate(slow) if (number - int(_EIGHTH)) % 8}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Where no lab can be made, what needs one is skipped, with the reason."""
    if item.get_closest_marker("netns") is not None and (why := _no_lab()):
        pytest.skip(why)


@cache
def _no_lab() -> str:
    try:
        netlab.require()
    except netlab.NetlabUnavailable as unavailable:
        return str(unavailable)
    return ""


def pytest_report_header() -> str:
    return f"of the slow tests, eighth {int(_EIGHTH) % 8} of 0 to 7" if _EIGHTH else ""


@pytest.fixture(autouse=True, scope="session")
def _one_thread_for_torch() -> None:
    """The same bytes on every machine, and no fight over two cores."""
    torch.set_num_threads(1)
    with suppress(ImportError):  # what compiles shows progress with it, and it would leave a thread for ever
        from tqdm import tqdm

        tqdm.monitor_interval = 0


@pytest.fixture(autouse=True)
def _leak_police() -> Iterator[None]:
    threads, sockets, children, environment = set(threading.enumerate()), _sockets(), _children(), dict(os.environ)
    began = time.time()
    yield
    left = [
        *_threads_left(threads),
        *_children_left(children, began),
        *_sockets_left(sockets),
        *_environment_left(environment),
    ]
    if left:
        pytest.fail("this test left behind: " + "; ".join(left), pytrace=False)


def _threads_left(before: set[threading.Thread]) -> list[str]:
    deadline = time.monotonic() + GRACE_S
    new = [thread for thread in threading.enumerate() if thread not in before]
    for thread in new:
        if thread.ident is not None:
            thread.join(max(0.0, deadline - time.monotonic()))
    return [f"thread '{thread.name}'" for thread in new if thread.is_alive()]


def _children() -> set[psutil.Process]:
    """All processes below this one. psutil would read of every process of the machine whose child it is: 1 ms."""
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        return set(psutil.Process().children(recursive=True))
    found, look = set[psutil.Process](), [os.getpid()]
    while look:
        with suppress(OSError):  # it has ended meanwhile
            for task in Path(f"/proc/{look.pop()}/task").iterdir():
                for pid in map(int, (task / "children").read_text().split()):
                    look.append(pid)
                    with suppress(psutil.NoSuchProcess):
                        found.add(psutil.Process(pid))
    return found


def _children_left(before: set[psutil.Process], began: float) -> list[str]:
    # The system may leave one out of a list that it tells while another ends: that was there before, and is no leak.
    new = [child for child in _children() - before if child.create_time() > began - 1.0 and not _kept(child)]
    if not new:
        return []
    _, alive = psutil.wait_procs(new, timeout=GRACE_S)
    left = []
    for child in alive:
        left.append(f"process {child.pid} ({_command(child)})")
        child.kill()  # it was this test's own; the next test shall not meet it
        child.wait(GRACE_S)
    return left


def _kept(child: psutil.Process) -> bool:
    return any(name in _command(child) for name in _OURS_TO_KEEP)


def _command(child: psutil.Process) -> str:
    """Return its command line; without one (it has ended, and nobody has asked how), who should have asked."""
    try:
        return " ".join(child.cmdline()) or _remains(child)
    except psutil.Error:
        return _remains(child)


def _remains(child: psutil.Process) -> str:
    try:
        return f"{child.name()}, {child.status()}, a child of {psutil.Process(child.ppid()).name()}"
    except psutil.Error:
        return "gone by now"


def _sockets() -> set[str]:
    """This process's open sockets, each under a name that is never used twice at a time."""
    links = Path("/proc/self/fd")
    if not links.is_dir():
        return {str(connection) for connection in psutil.Process().net_connections(kind="all")}
    found = set()
    for link in links.iterdir():
        try:
            target = os.readlink(link)
        except OSError:
            continue  # the descriptor with which we read the folder
        if target.startswith("socket:"):
            found.add(target)
    return found


def _sockets_left(before: set[str]) -> list[str]:
    new = _sockets() - before
    if new:
        gc.collect()  # an exception's traceback may hold one until then: not a leak of the code under test
        new = _sockets() - before
    return [f"{len(new)} open sockets"] if new else []


def _environment_left(before: dict[str, str]) -> list[str]:
    names = {*before, *os.environ} - _MAY_CHANGE
    changed = sorted(name for name in names if before.get(name) != os.environ.get(name))
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    return [f"environment variable {name}" for name in changed]
