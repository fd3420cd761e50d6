"""The flags of ``scripts/pretrain_gpt.py``, which have Megatron-LM's names: parser, configuration files and checks.

``advise`` and ``dry-run`` read jobs of Megatron-LM with the same parser. The loop itself is in ``examples/pretrain``.
"""
