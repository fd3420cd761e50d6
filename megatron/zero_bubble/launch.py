"""Entry point of ``python -m megatron.zero_bubble.launch SCRIPT ...``.

See :mod:`megatron.zero_bubble.megatron_lm.launch`.
"""

import sys

from megatron.zero_bubble.megatron_lm.launch import join, main

__all__ = ["join", "main"]

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
