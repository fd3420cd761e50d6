"""Analyse schedules and traces: validity, length, memory, lower bounds, and differences between plan and run."""
