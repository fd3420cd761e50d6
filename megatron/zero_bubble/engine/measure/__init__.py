"""Measurements of a run: passes, waits, bubbles, memory."""
