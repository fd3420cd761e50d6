"""Slow stand-ins in torch for the kernels of ``fla`` with which megatron-core trains gated delta nets."""

__version__ = "0.4.0"
