"""Plans in megatron-core, Megatron-LM and Megatron-Bridge: stages, patches, launchers."""
