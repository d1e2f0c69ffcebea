"""The tree of a sum over replicas (I3), and what a worker adds up of it before it sends."""
