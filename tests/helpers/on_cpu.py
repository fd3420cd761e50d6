"""Run an unmodified Megatron-LM script on a CPU rank: ``on_cpu.py SCRIPT ARGUMENTS``."""

import runpy
import sys
from pathlib import Path

from megatron.zero_bubble.engine.platforms import cpu, select
from megatron.zero_bubble.engine.platforms.cpu.megatron_lm import JOB_POINTS

if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    cpu.install(JOB_POINTS)
    select("cpu").setup(0)
    runpy.run_path(sys.argv[0], run_name="__main__")
