"""Snapshots on any fsspec filesystem: shard files first, then the manifest that makes them one; and their export."""
