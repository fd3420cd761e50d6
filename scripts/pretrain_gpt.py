#!/usr/bin/env python3
"""Pretrain a GPT with the loop in examples/pretrain.

torchrun --nproc-per-node 4 scripts/pretrain_gpt.py --config configs/gpt_tiny.yaml --zero-bubble-schedule zb-h1
"""

import sys
from pathlib import Path

from megatron.zero_bubble.cli.deciding import decided_for_our_loop

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "examples"))

if __name__ == "__main__":
    from pretrain.run import main

    sys.exit(main(decided_for_our_loop(sys.argv[1:])))
