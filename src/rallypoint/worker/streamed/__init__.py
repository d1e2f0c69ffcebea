"""Parameters that stay on the servers (`parameters="streamed"`): pulled when a module needs them, freed after use."""
