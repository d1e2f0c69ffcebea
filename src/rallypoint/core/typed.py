"""Builds msgspec's decoders before there are threads."""

from __future__ import annotations

from typing import Any

import msgspec


def build_now(*types: Any) -> None:
    """Build msgspec's type information for `types` now. Call it at import, in each module that decodes these types.

    Otherwise msgspec builds it at the first use, and two threads that do so at the same time crash the process (0.22,
    with the GIL: building runs Python code in between). A decoder that is constructed at import works as well.
    """
    for kind in types:
        msgspec.msgpack.Decoder(kind)
