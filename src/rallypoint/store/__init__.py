"""Snapshots on any fsspec filesystem, and their export: shard files first, then the manifest that commits them."""
