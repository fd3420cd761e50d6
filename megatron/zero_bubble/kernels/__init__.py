"""The weight gradients of deferred W's: compiled ops (csrc/) where they were built, else their reference in torch."""

from megatron.zero_bubble.kernels.implementation import Kernels, select

__all__ = ["Kernels", "select"]
