"""The slow imports, done once by the fork server and inherited by the ranks: megatron-core, and a whole training run.

Objects alive at the fork are frozen, i.e. excluded from garbage collection: a collection between tests then takes
milliseconds and does not copy the memory pages that the ranks share.
"""

import atexit
import gc
from types import SimpleNamespace

import megatron.core.datasets.gpt_dataset
import megatron.core.dist_checkpointing
import megatron.core.distributed
import megatron.core.models.gpt.gpt_layer_specs
import megatron.core.optimizer
import megatron.core.pipeline_parallel.schedules
import megatron.core.rerun_state_machine
import megatron.core.transformer.moe.moe_utils
import psutil  # noqa: F401
import pytest  # noqa: F401  (a rank imports the test module that its function lives in)
from megatron.core.dist_checkpointing.strategies import filesystem_async

import megatron.zero_bubble.integration.adapter.auto
import megatron.zero_bubble.integration.patching.apply
import megatron.zero_bubble.planning.job.arguments.checks
import megatron.zero_bubble.planning.job.arguments.parser
import pretrain.checkpoint
import pretrain.loop
import pretrain.model
import pretrain.run
import pretrain.schedule  # noqa: F401

# Shuffling upstream's 100,000 mock documents, cut into tests' short samples, takes each rank seconds.
megatron.core.datasets.gpt_dataset.MockGPTLowLevelDataset.size = 1000

# The writers of a checkpoint report to a process that upstream starts, which takes each rank seconds of imports.
_upstreams = filesystem_async.mp
_forking = {**vars(_upstreams), "get_context": lambda _kind: _upstreams.get_context("fork")}
filesystem_async.mp = SimpleNamespace(**_forking)

gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)  # otherwise extension modules report frozen objects as leaked when the server ends
