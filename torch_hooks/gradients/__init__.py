"""The gradients of a round, and their sum over all ranks."""
