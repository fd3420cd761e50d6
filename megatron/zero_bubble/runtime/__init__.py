"""Execute a plan: the loop, the transport between ranks, and the watch for lost ranks. Nothing here knows Megatron."""
