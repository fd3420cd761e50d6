"""Execution of plans: platforms, kernels, transport, weight gradients, optimizer steps and measurements."""
