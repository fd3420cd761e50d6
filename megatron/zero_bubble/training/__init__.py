"""A small GPT pretraining loop on megatron-core's own parts, with Megatron's flag names.

``scripts/pretrain_gpt.py`` is its entry point. The modules, in the order of a run: :mod:`arguments` and
:mod:`config_file` (what the user says), :mod:`checks` (whether it can work), :mod:`distributed` (process groups),
:mod:`model`, :mod:`data` with :mod:`tokenizer` and :mod:`indexed`, :mod:`checkpoint`, :mod:`loop` with
:mod:`progress` and :mod:`stop`; :mod:`pretrain` puts them together. :mod:`corpus` makes the data of the demo.
"""
