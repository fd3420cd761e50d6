"""megatron.core meets the plan."""
