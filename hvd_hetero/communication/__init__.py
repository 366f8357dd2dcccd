"""Messages between ranks, and how gradients are bucketed."""
