"""The slow imports, done once by the fork server and inherited by the ranks.

Objects alive at the fork are frozen, i.e. excluded from garbage collection: a collection between tests then takes
milliseconds and does not copy the memory pages that the ranks share.
"""

import atexit
import gc

import megatron.core.datasets.gpt_dataset
import megatron.core.distributed
import megatron.core.models.gpt
import megatron.core.optimizer
import megatron.core.pipeline_parallel.schedules
import megatron.core.rerun_state_machine
import megatron.core.transformer.moe.moe_utils
import pytest  # noqa: F401  (a rank imports the test module that its function lives in)

# Shuffling upstream's 100,000 mock documents, cut into tests' short samples, takes each rank seconds.
megatron.core.datasets.gpt_dataset.MockGPTLowLevelDataset.size = 1000

gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)  # otherwise extension modules report frozen objects as leaked when the server ends
