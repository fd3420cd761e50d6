"""The optimizer that steps first and validates later."""
