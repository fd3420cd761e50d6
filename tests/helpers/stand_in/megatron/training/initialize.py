"""Parses and validates, as upstream's ``initialize_megatron`` does before everything else."""

import argparse

from megatron.training.arguments import parse_args, validate_args


def initialize_megatron() -> argparse.Namespace:
    """The validated flags."""
    args = parse_args()
    validate_args(args, {})
    return args
