"""Tests of Megatron-LM's ``pretrain_gpt.py`` with the launcher; for checkouts see ``tests/helpers/megatron_lm.py``."""
