"""What is measured of a run: passes, waits, bubbles, memory."""
