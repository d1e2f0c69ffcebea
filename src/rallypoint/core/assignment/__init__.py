"""Who computes which replica: evenly, or by measured speed (pure)."""
