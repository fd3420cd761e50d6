"""Runs of Megatron-Bridge's own ``pretrain()`` on CPU ranks, from the checkout that ``ZB_BRIDGE`` names."""
