"""What a rank learns about itself: its speed, its processor and memory, and what fits in memory."""
