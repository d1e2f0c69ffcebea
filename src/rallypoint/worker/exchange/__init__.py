"""The worker's data plane: links to servers, slots, what arrives."""
