"""What the tests and the benchmarks share, and nobody else needs: it is not in the package."""
