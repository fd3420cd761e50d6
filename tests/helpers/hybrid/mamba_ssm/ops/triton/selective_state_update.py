"""What only inference uses."""

selective_state_update = None
