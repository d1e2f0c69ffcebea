"""Large payloads by one-sided writes into the other side's memory: NIXL (UCX), where both sides have it."""
