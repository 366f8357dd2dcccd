"""What the loader reads: samplers, streams, and how many samples a batch holds."""
