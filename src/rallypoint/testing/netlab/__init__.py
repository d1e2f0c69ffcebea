"""Hosts as network namespaces on one machine, with links of a known rate, racks, and uplinks that take time.

`lab` makes and removes a lab, `ending` kills what runs in one, `delay` is the program that delays an uplink.
"""

from rallypoint.testing.netlab.lab import MAX_HOSTS, Host, Netlab, NetlabUnavailable, require

__all__ = ["MAX_HOSTS", "Host", "Netlab", "NetlabUnavailable", "require"]
