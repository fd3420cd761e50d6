"""The tests; folders mirror ``megatron/zero_bubble``, ``helpers`` holds what they share."""
