"""``rallypoint plan``: what a job would cost on some machines, or an earlier run on others. `core.plan` computes it."""
