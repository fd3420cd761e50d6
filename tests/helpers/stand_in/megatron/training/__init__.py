"""The names of ``megatron.training`` that the launcher takes, for tests without a checkout of Megatron-LM."""
