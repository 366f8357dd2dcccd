"""Data: which samples each rank gets in each round."""
