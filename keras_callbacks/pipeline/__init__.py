"""From the data of a user to the batches of this rank."""
