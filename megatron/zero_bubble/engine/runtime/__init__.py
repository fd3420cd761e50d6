"""Plan execution, point-to-point transport between ranks, and detection of lost ranks. Independent of Megatron."""
