"""One contract suite for each interface; every implementation passes it.

    transports  `TransportContract`: TCP, in-process, faulty
    cluster     `ClusterContract`: how a launcher starts, signals and ends processes

A test module subclasses the suite and names the implementation; pytest then finds the suite's tests there.
"""
