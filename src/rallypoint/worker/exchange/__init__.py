"""The worker's data plane: links to servers, the slots of the exchange buffer, and what arrives."""
