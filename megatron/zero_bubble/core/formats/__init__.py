"""The JSON file formats: schedules, costs and traces."""
