"""Draw timelines as text, SVG, an HTML page or Perfetto events."""
