"""How tensors travel to the other ranks."""
