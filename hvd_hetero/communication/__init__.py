"""What travels between ranks, and in what company."""
