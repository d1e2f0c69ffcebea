"""What the coordinator decides about audits."""
