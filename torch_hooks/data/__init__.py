"""The loader's reading: samplers, streams, and how many samples a batch holds."""
