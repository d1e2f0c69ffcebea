"""Autotuning: tries values of a knob that changes no bytes while the job runs, and keeps what makes steps shorter."""
