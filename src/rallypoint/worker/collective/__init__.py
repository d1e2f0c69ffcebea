"""Sums over all workers for a script that has a loop of its own: no model, no steps, no versions to install."""
