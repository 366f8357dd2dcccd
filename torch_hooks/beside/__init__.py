"""Unequal batches beside a reducer of the user's own."""
