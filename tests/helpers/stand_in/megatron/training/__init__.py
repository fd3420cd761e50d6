"""A fake of the names of ``megatron.training`` that the launcher uses, for tests without a Megatron-LM checkout."""
