"""A Megatron-LM job under a zero-bubble schedule: its launcher, its checks, its models and its measurements."""
