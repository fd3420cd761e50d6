"""The slow imports, done once by the fork server; ranks inherit them.

Objects alive at the fork are frozen out of the garbage collector: a collection between tests then takes milliseconds,
and does not copy the pages that the ranks share.
"""

import atexit
import gc

import megatron.core.distributed
import megatron.core.models.gpt
import megatron.core.optimizer
import megatron.core.pipeline_parallel.schedules
import megatron.core.rerun_state_machine
import megatron.core.transformer.moe.moe_utils  # noqa: F401
import pytest  # noqa: F401  (a rank imports the test module that its function lives in)

gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)  # or extension modules report everything frozen as leaked when the server ends
