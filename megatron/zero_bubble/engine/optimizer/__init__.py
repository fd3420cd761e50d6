"""Post-validation: the optimizer steps before the global gradient norm is known, and validates the step later."""
