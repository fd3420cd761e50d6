"""Megatron-LM's own ``pretrain_gpt.py`` under the launcher; needs checkouts, see ``tests/helpers/megatron_lm.py``."""
