"""The driver's connection to a Ray cluster."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

from rallypoint.errors import UsageError, to_install
from rallypoint.net.tcp import split_address

NAMESPACE = "rallypoint"
_CONNECT_S = 10.0


def ray_module() -> Any:
    """Return Ray. Raises UsageError when it is not installed."""
    try:
        import ray
        import ray.util
        import ray.util.placement_group
    except ImportError:
        raise UsageError(f"there is no Ray here: {to_install('ray')}") from None
    return ray


def connect(address: str) -> None:
    """Connect to a Ray cluster, or start one. Ray's own handler of SIGTERM is not left in place.

    Raises UsageError if there is none, or the address is of no use.
    """
    ray = ray_module()
    _check(address)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "namespace": NAMESPACE}
    with _own_handlers():
        try:
            if address == "local":
                ray.init(address="local", include_dashboard=False, **options)
            else:
                ray.init(address=address, **options)
        except ray.exceptions.AuthenticationError as error:
            raise UsageError(
                "the Ray cluster wants its token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN unless it is in "
                f"~/.ray/auth_token ({str(error).splitlines()[0]})"
            ) from None
        except ConnectionError:
            raise UsageError(_none(address)) from None


def _check(address: str) -> None:
    """Raise UsageError unless the address may be a cluster's. Ray itself tries for minutes, without a word."""
    if address in ("auto", "local"):
        return
    if "://" in address:
        raise UsageError(f"--address {address}: Ray Client is not supported; `ray job submit` runs this on the cluster")
    host, port = split_address(address)
    try:
        socket.create_connection((host, port), _CONNECT_S).close()
    except OSError as error:
        raise UsageError(f"{_none(address)} ({error.strerror or error})") from None


def _none(address: str) -> str:
    where = "on this machine" if address == "auto" else f"at {address}"
    return f"there is no Ray cluster {where}: start one with `ray start --head`, or add --address local"


@contextlib.contextmanager
def _own_handlers() -> Iterator[None]:
    """In the body Ray may set handlers of signals; afterwards they are as before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
