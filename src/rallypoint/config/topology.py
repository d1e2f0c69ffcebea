"""Reads what a user tells of the machines: a TOML or JSON file.

    [hosts.node1]                 # the name that the host gives itself, or the address at which its servers listen
    rack = "a"
    link_mbit = 10000

    [racks.a]                     # only for racks whose uplink is narrow
    uplink_mbit = 20000

In JSON: ``{"hosts": {"node1": {"rack": "a", "link_mbit": 10000}}, "racks": {"a": {"uplink_mbit": 20000}}}``.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec

from rallypoint.core.plan.topology import Topology
from rallypoint.errors import ConfigError


def read_topology(path: Path) -> Topology:
    """Return what the file says. Raises ConfigError if it cannot be read, or says something else."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"the topology {path} cannot be read: {error.strerror}") from None
    try:
        data = msgspec.json.decode(text) if path.suffix == ".json" else tomllib.loads(text.decode())
        return msgspec.convert(data, Topology)
    except (msgspec.DecodeError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:  # (or a ValidationError)
        raise ConfigError(
            f"the topology {path}: {error}. Write [hosts.NAME] with rack = \"a\" and link_mbit = 10000, and [racks.a] "
            "with uplink_mbit = 20000 (or the same in JSON, in a file that ends with .json)"
        ) from None
