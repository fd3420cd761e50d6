"""Slow stand-ins in torch for the kernels of ``mamba_ssm`` with which megatron-core trains Mamba layers.

They have the names and arguments that megatron-core uses, and run on a CPU. This folder is on the path of the tests
that train hybrid models.
"""

__version__ = "2.3.0"
