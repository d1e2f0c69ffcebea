"""Public test tools: your own script under kills, references in plain PyTorch, real processes, contract suites."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rallypoint.testing.killed import simulate

__all__ = ["simulate"]


def __getattr__(name: str) -> Any:
    if name != "simulate":  # torch and a whole cluster are imported by who uses it
        raise AttributeError(f"module 'rallypoint.testing' has no attribute {name!r}")
    from rallypoint.testing.killed import simulate

    return simulate
