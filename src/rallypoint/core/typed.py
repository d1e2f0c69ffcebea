"""What msgspec knows of our types, built before there are threads."""

from __future__ import annotations

from typing import Any

import msgspec


def build_now(*types: Any) -> None:
    """To be called where a module that decodes these types is imported.

    Otherwise msgspec builds it at the first use, and two threads that do so at once crash the process (0.22, with the
    GIL: building runs Python code in between). A decoder made at import does the same.
    """
    for kind in types:
        msgspec.msgpack.Decoder(kind)
