"""Runs plans on megatron-core models: stages, placement, data iterators, losses."""
