#!/usr/bin/env python3
"""Pretrain a GPT.

torchrun --nproc-per-node 4 scripts/pretrain_gpt.py --config configs/gpt_tiny.yaml --zero-bubble-schedule zb-h1
"""

import sys

from megatron.zero_bubble.cli.deciding import decided_for_our_loop
from megatron.zero_bubble.training.pretrain import main

if __name__ == "__main__":
    sys.exit(main(decided_for_our_loop(sys.argv[1:])))
