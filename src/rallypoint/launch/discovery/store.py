"""Writes one key of torch's TCPStore: ``python -m rallypoint.launch.discovery.store HOST PORT KEY [serve]``.

The value is the first line of standard input. When the input ends, the key is deleted. ``serve``: this process opens
the store, where torchrun has not.
"""

from __future__ import annotations

import contextlib
import sys
from datetime import timedelta

_TIMEOUT = timedelta(seconds=60)


def main() -> None:
    """Publish the line, wait for the end of the input, take it back."""
    host, port, key, *serve = sys.argv[1:]
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]  # torch names it so itself

    store = TCPStore(
        host, int(port), is_master=bool(serve), timeout=_TIMEOUT, wait_for_workers=False, multi_tenant=True
    )  # fmt: skip
    store.set(key, sys.stdin.readline().strip())
    sys.stdin.read()
    with contextlib.suppress(DistError, RuntimeError):  # the store went first
        store.delete_key(key)


if __name__ == "__main__":
    main()
