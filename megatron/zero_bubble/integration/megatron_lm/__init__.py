"""Run Megatron-LM jobs under zero-bubble schedules: launcher, checks, building of models, and measurements."""
