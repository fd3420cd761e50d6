#!/usr/bin/env python3
"""Pretrain a GPT.

torchrun --nproc-per-node 4 scripts/pretrain_gpt.py --config configs/gpt_tiny.yaml --zero-bubble-schedule zb-h1
"""

import sys

from megatron.zero_bubble.training.pretrain import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
