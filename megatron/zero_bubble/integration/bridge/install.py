"""Give the runs of Megatron-Bridge the schedule that their configuration or the environment names.

A script of Megatron-Bridge makes a ``ConfigContainer`` and calls ``pretrain(config, ...)`` or ``finetune(config,
...)``, which begin with ``runtime_config_update(config)``. ``install`` replaces that function, so that every run first
reads the variables ``ZERO_BUBBLE_*``, from the environment of the process and from ``config.env_vars``. As in
Megatron-Bridge, the environment has precedence. If a schedule is named, the stages of the model are placed as it needs
them, the job is checked, and the schedule is enabled, before any process group or model exists.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from megatron.zero_bubble.core.errors import UserError
from megatron.zero_bubble.integration.bridge.building import provided
from megatron.zero_bubble.integration.bridge.stages import place
from megatron.zero_bubble.integration.megatron_lm.batches import num_microbatches
from megatron.zero_bubble.integration.megatron_lm.builder import Builder
from megatron.zero_bubble.integration.megatron_lm.of_version import has_ramps
from megatron.zero_bubble.integration.patching.apply import apply, in_place_of
from megatron.zero_bubble.integration.patching.apply import revert as revert_schedule
from megatron.zero_bubble.integration.patching.replaced import Replaced, Replacement
from megatron.zero_bubble.integration.patching.seam import Seam
from megatron.zero_bubble.integration.patching.seams import installed_seams
from megatron.zero_bubble.planning.job.config import ZeroBubbleConfig
from megatron.zero_bubble.planning.job.environment import PREFIX, flags_in
from megatron.zero_bubble.planning.job.rules import check_schedule
from megatron.zero_bubble.planning.job.runnable import is_megatrons_own
from megatron.zero_bubble.planning.job.settled import settle_options
from megatron.zero_bubble.planning.source import ScheduleSource

PRETRAIN = "megatron.bridge.training.pretrain"
"""The module of Megatron-Bridge's ``pretrain``."""
_CONFIGURED = Seam(
    PRETRAIN, "runtime_config_update", ("cfg",), "reads the schedule of a run from its configuration, and enables it"
)
_PROVIDED = Seam(
    "megatron.bridge.models.model_provider",
    "_create_model",
    ("model_provider", "model_type", "pg_collection"),
    "builds each model chunk of a provider on the rank where the placement has it",
)
_BUILT = "build_virtual_pipeline_stages"
"""The function of Megatron-LM that builds the chunks of a ``ModelConfig``."""
_runs = Replaced()
_placed = Replaced()  # names that are replaced once the configuration of a run is known, and the schedule in force


def install(say: Callable[[str], None] = print) -> None:
    """Read the schedule of every following run. A second call does nothing.

    Args:
        say: prints the line that names the schedule of a run, on rank 0.

    Raises:
        SeamError: a name in Megatron-Bridge or in megatron-core is not as expected.
    """
    if not _runs:
        _runs.replace([(_CONFIGURED, lambda update: _configured(update, say))])


def revert() -> None:
    """Restore all names of Megatron-Bridge, and those of megatron-core that a run has replaced."""
    _placed.revert()
    _runs.revert()


def report() -> list[str]:
    """One line per name of Megatron-Bridge, and of the building of its models, that is currently replaced."""
    return [*_runs.report(), *_placed.report()]


def _configured(update: Callable[[Any], None], say: Callable[[str], None]) -> Callable[[Any], None]:
    @functools.wraps(update)
    def runtime_config_update(cfg: Any) -> None:
        _placed.revert()  # the schedule of an earlier run in this process
        run = flags_in(_variables(cfg.env_vars, os.environ))
        if not run.has_schedule:
            update(cfg)
            return
        config, source = place(cfg.model, run, 60.0 * cfg.dist.distributed_timeout_minutes)
        update(cfg)
        run_of_source = replace(run, setup=run.setup.running(source.setup))
        switched_off = settle_options(_options_of(cfg), run_of_source, is_megatrons_own(source.placement))
        check_schedule(run, source, source.placement.num_ranks, num_microbatches(_batches(cfg), has_ramps()), cfg.model)
        if not is_megatrons_own(source.placement):
            _check_groups(cfg.dist)
        _put_in_force(config, source, say)
        for line in switched_off:
            say(line)

    return runtime_config_update


def _options_of(cfg: Any) -> list[Any]:
    found = (cfg.model, getattr(cfg, "ddp", None), getattr(cfg, "optimizer", None))
    return [options for options in found if options is not None]


def _variables(of_run: Mapping[str, Any], of_process: Mapping[str, str]) -> dict[str, str]:
    """The variables of a run; as Megatron-Bridge does it, those of the process replace those of the configuration."""
    return {name: str(value) for name, value in of_run.items() if name.startswith(PREFIX)} | dict(of_process)


def _batches(cfg: Any) -> Any:
    """The batch sizes of a run under the names of Megatron-LM."""
    evaluation = ("eval_iters", "eval_global_batch_size", "eval_micro_batch_size")
    return SimpleNamespace(
        micro_batch_size=cfg.train.micro_batch_size,
        global_batch_size=cfg.train.global_batch_size,
        rampup_batch_size=getattr(cfg.train, "rampup_batch_size", None),
        data_parallel_size=cfg.data_parallel_size,
        decrease_batch_size_if_needed=getattr(cfg.train, "decrease_batch_size_if_needed", False),
        **{name: getattr(cfg.validation, name, None) for name in evaluation},
    )


def _check_groups(dist: Any) -> None:
    if getattr(dist, "use_decentralized_pg", False):
        raise UserError(
            "a schedule on a V or in a wave needs the embedding group on the rank of its first and last stage, which "
            "only Megatron's global groups get; got dist.use_decentralized_pg=True; set it to False, or choose a "
            "schedule with one stage per rank"
        )


def _put_in_force(config: ZeroBubbleConfig, source: ScheduleSource, say: Callable[[str], None]) -> None:
    revert_schedule()  # what megatron.zero_bubble.auto has applied by the same variables
    apply(config, say=say, source=source)
    _placed.replace(_building(source), close=revert_schedule)
    say(f"{in_place_of(config)}, for this run of Megatron-Bridge")


def _building(source: ScheduleSource) -> list[Replacement]:
    """What builds the model's chunks where the schedule has them."""
    placement, divides = source.placement, source.setup.vocabulary is not None
    if is_megatrons_own(placement) and not divides:
        return []
    seams, builder = installed_seams(), Builder(placement, divides)
    return [
        (_PROVIDED, lambda create: provided(create, builder)),
        *((seam, builder.building) for seam in seams.models if seam.name == _BUILT),
    ]
