"""Control messages about audits."""
