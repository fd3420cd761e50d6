"""Run Megatron-Bridge's ``pretrain()``, unmodified, under zero-bubble schedules: its configuration and its models."""
