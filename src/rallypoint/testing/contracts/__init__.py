"""One contract suite for each interface; every implementation passes it.

    cluster     `ClusterContract`: how a launcher starts, signals and ends processes
    trackers    `TRACKER_CONTRACT`: what takes the figures of a run

A test module subclasses the suite and names the implementation; pytest then finds the suite's tests there.
"""
