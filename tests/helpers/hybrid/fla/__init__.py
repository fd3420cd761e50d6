"""Slow stand-ins in torch for the kernels of ``fla`` with which megatron-core trains gated delta nets.

They have the names and arguments that megatron-core uses, and run on a CPU.
"""
