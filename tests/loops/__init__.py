"""Small loops with the call sequences of frameworks around megatron-core, run under stock and under our schedules."""
