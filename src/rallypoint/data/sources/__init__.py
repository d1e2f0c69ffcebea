"""Data sets in files, here or on any store: token files, Parquet, tars. Each tells its shards, for order="windowed"."""
