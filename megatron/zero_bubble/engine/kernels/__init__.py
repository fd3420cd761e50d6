"""Kernels for the weight gradients of W passes: compiled ops (csrc/) if they were built, else a reference in torch."""

from megatron.zero_bubble.engine.kernels.implementation import Kernels, compare_ranks, select

__all__ = ["Kernels", "compare_ranks", "select"]
