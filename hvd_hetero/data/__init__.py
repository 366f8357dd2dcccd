"""Which samples go where."""
