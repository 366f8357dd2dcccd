"""The gradients of a round, on their way to the other ranks."""
