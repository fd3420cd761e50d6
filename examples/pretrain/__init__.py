"""A small GPT pretraining loop on megatron-core's own parts: a demonstration, and the reference of the parity tests.

``scripts/pretrain_gpt.py`` is its entry point. The package parses and checks the flags
(:mod:`megatron.zero_bubble.planning.job.arguments`). The modules, in the order in which a run uses them:
:mod:`distributed` creates the process groups, :mod:`schedule` enables the zero-bubble schedule, :mod:`model`,
:mod:`data` and :mod:`checkpoint` build and restore what is trained, and :mod:`loop` trains, with :mod:`report` and
:mod:`stop`. :mod:`run` connects them.
"""
