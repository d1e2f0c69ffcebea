"""The tree of a sum over replicas (I3), what a worker adds up of it before it sends, and digests of its leaves."""
