"""Kernels for the weight gradients of W passes: compiled ops (csrc/) if they were built, else a reference in torch."""

from megatron.zero_bubble.kernels.implementation import Kernels, select

__all__ = ["Kernels", "select"]
