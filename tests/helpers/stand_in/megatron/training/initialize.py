"""Parse and validate the flags, as upstream's ``initialize_megatron`` does first."""

import argparse

from megatron.training.arguments import parse_args, validate_args


def initialize_megatron() -> argparse.Namespace:
    """Return the validated flags."""
    args = parse_args()
    validate_args(args, {})
    return args
