"""A small GPT pretraining loop on megatron-core's own parts, with Megatron's flag names.

``scripts/pretrain_gpt.py`` is its entry point. The modules, in the order in which a run uses them: :mod:`arguments`
and :mod:`config_file` parse the flags, :mod:`checks` validates them, :mod:`distributed` creates the process groups,
:mod:`schedule` enables the zero-bubble schedule, :mod:`model`, :mod:`data` and :mod:`checkpoint` build and restore what
is trained, and :mod:`loop` trains, with :mod:`report` and :mod:`stop`. :mod:`pretrain` connects them.
"""
