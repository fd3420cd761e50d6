"""Execute a plan: the loop, the stages, the transport between ranks and the store of deferred weight gradients."""
