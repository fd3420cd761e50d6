"""What is read from and written to disk as JSON, and nothing else: schedules, costs, traces."""
