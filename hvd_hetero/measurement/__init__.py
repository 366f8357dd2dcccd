"""What a rank learns of itself: its speed, its processor and memory, and what it can hold."""
