"""Entry point of ``python -m megatron.zero_bubble.launch SCRIPT ...``.

See :mod:`megatron.zero_bubble.integration.megatron_lm.launch`.
"""

import sys

from megatron.zero_bubble.cli.deciding import decided
from megatron.zero_bubble.integration.megatron_lm import launch

__all__ = ["join", "main"]


def main(argv: list[str]) -> int:
    """Run the script ``argv[0]`` with the other arguments; return the exit code unless the script itself exits."""
    return launch.main(argv, decided)


def join() -> None:
    """Enable the zero-bubble flags in the script of this process; see ``megatron_lm.launch.join``."""
    launch.join(decided)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
