"""Controls access to an optimizer whose last step is not validated yet.

The lists were checked for megatron-core 0.13 to 0.20. While a step is pending, names that are in neither list raise.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

from megatron.core.optimizer import MegatronOptimizer

from megatron.zero_bubble.core.errors import UserError

ANY_TIME = frozenset(
    {
        "config",
        "is_stub_optimizer",
        "get_loss_scale",
        "scale_loss",
        "get_grad_stats_parallel_group",
        "grads_states_parallel_group_is_shared",
    }
)
"""Attributes that neither expose nor change parameters or states. The loss scale is that of the last validated step."""

SETTLES_FIRST = frozenset(
    {
        "sharded_state_dict",
        "load_state_dict",
        "load_state_dict_from_file",
        "save_state_dict_to_file",
        "save_parameter_state",
        "load_parameter_state",
        "reload_model_params",
        "offload_to_cpu",
        "restore_from_cpu",
        "prepare_model_params_for_param_sync",
    }
)
"""Methods that Megatron-LM calls on every rank that has parameters, so that they can make the step final first.
``state_dict`` is not in the list, because for older checkpoint formats only some ranks call it.
"""


class CountedParameters(Sequence[Any]):
    """The parameters of a group, which can be counted; access to one of them calls ``check``.

    Args:
        check: raises if the parameters must not be accessed now.
    """

    def __init__(self, parameters: Sequence[Any], check: Callable[[], None]) -> None:
        self._parameters = parameters
        self._check = check

    def __len__(self) -> int:
        return len(self._parameters)

    def __getitem__(self, index: Any) -> Any:
        self._check()
        return self._parameters[index]


class GroupOptions(MutableMapping[str, Any]):
    """The options of a parameter group, for a learning-rate scheduler; access to a parameter calls ``check``.

    Args:
        check: raises if the parameters must not be accessed now.
    """

    def __init__(self, group: dict[str, Any], check: Callable[[], None]) -> None:
        self._group = group
        self._check = check

    def __getitem__(self, key: str) -> Any:
        return CountedParameters(self._group[key], self._check) if key == "params" else self._group[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._guard(key)
        self._group[key] = value

    def __delitem__(self, key: str) -> None:
        self._guard(key)
        del self._group[key]

    def __iter__(self) -> Iterator[str]:
        return (key for key in self._group if key != "params")

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _guard(self, key: str) -> None:
        if key == "params":
            self._check()


class OptimizerSurface(ABC):
    """Forwards attributes to an optimizer if that is safe; see the lists above."""

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        self._optimizer = optimizer

    @property
    @abstractmethod
    def is_pending(self) -> bool:
        """Whether the last step is not final."""

    @abstractmethod
    def settle(self) -> None:
        """Make the last step final; all ranks call it."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._optimizer, name)
        if name in ANY_TIME:
            return value
        if not callable(value):
            self._refuse_while_pending(name)
            return value
        first = self.settle if name in SETTLES_FIRST else functools.partial(self._refuse_while_pending, name)

        @functools.wraps(value)
        def forwarded(*args: Any, **kwargs: Any) -> Any:
            first()
            return value(*args, **kwargs)

        return forwarded

    @property
    def state(self) -> Any:
        self._refuse_while_pending("state")
        return self._optimizer.state

    @property
    def param_groups(self) -> Any:
        """The optimizer's parameter groups; while a step is pending, only their options, for the next steps."""
        groups = self._optimizer.param_groups
        check = functools.partial(self._refuse_while_pending, "param_groups[...]['params']")
        return [GroupOptions(group, check) for group in groups] if self.is_pending else groups

    def _refuse_while_pending(self, name: str) -> None:
        if self.is_pending:
            raise UserError(
                f"optimizer.{name} cannot be used while a step is pending, because the step may still be undone; "
                "call PostValidatedOptimizer.settle() on all ranks first"
            )


def check_optimizers(parts: Sequence[MegatronOptimizer]) -> None:
    """Raise UserError for options that post-validation does not support.

    Args:
        parts: the optimizer, and the parts of a chain.
    """
    for part in parts:
        if any(of.__name__ == "LayerWiseDistributedOptimizer" for of in type(part).__mro__):
            raise UserError(
                "post-validation does not support the layer-wise distributed optimizer, whose steps reduce the norm "
                "and gather weights over all ranks; use --optimizer adam, or drop --zero-bubble-post-validation"
            )
        config = part.config
        threshold = getattr(config, "grad_norm_skip_threshold", math.inf)
        if math.isfinite(threshold):
            raise UserError(
                "post-validation does not support steps skipped by their norm; got grad_norm_skip_threshold="
                f"{threshold}; drop one of the two options"
            )
        # A chain of several optimizers, such as those of dense weights and experts, has none of its own.
        parameters = () if hasattr(part, "chained_optimizers") else part.get_parameters()
        if any(getattr(parameter, "grad_norm_group", None) for parameter in parameters):
            raise UserError(
                "post-validation clips all gradients by one norm, but --mtp-detach-heads clips those of multi-token "
                "prediction by a separate norm; drop one of the two flags"
            )
