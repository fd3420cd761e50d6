"""Build the model chunks of a provider of Megatron-Bridge on the ranks where a placement has them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.zero_bubble.integration.megatron_lm.builder import Builder


def provided(create: Callable[..., Any], builder: Builder) -> Callable[..., Any]:
    """The replacement for ``_create_model(model_provider, model_type, pg_collection)``.

    It asks the provider for one chunk after the other, and the provider reads the process groups from itself.
    """

    @functools.wraps(create)
    def create_model(model_provider: Any, model_type: Any, pg_collection: Any) -> Any:
        def provide(groups: Any, **of_chunk: Any) -> Any:
            model_provider._pg_collection = groups
            return model_provider.provide(**of_chunk)

        def create_all(build: Callable[..., Any]) -> Any:
            placed = _Provider(model_provider, functools.partial(build, pg_collection))
            return create(placed, model_type, pg_collection)

        try:
            return builder.building(create_all)(provide)
        finally:
            model_provider._pg_collection = pg_collection

    return create_model


class _Provider:
    """A provider with another method that provides one chunk."""

    def __init__(self, original: Any, provide: Callable[..., Any]) -> None:
        self._original, self.provide = original, provide

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)
