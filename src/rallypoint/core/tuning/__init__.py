"""Settings that change no bytes, found while the job runs: by trials of whole steps (knobs), by the cost model (how
large shards are), and by what a port is measured to carry."""
