"""Timelines as pictures: text for terminals and docstrings, SVG for files."""
