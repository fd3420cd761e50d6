"""What autograd promises for a weight, and how a W keeps it: one row per clause.

A gradient that W computes does not pass through autograd on its own. Whoever may touch the gradient of a weight from
outside relies on a clause of this table; ``tests/engine/wgrad/test_contract.py`` tests each clause on every kind of
linear.
"""

from __future__ import annotations

from typing import NamedTuple


class Clause(NamedTuple):
    """One promise of autograd.

    Attributes:
        name: of the clause.
        promise: what autograd promises.
        kept: how a W keeps it.
    """

    name: str
    promise: str
    kept: str


CLAUSES = (
    Clause(
        "hooks",
        "The hooks of a parameter are called once per microbatch: those before and after the accumulation of its "
        "gradient, and those of the node that accumulates it.",
        "W gives the gradient of a parameter with hooks to that node; each W asks, since hooks come and go. With "
        "sequence slices, they are called for every slice.",
    ),
    Clause(
        "names",
        "``torch.autograd.grad(loss, weight)`` returns the gradient of a weight, and accumulates nothing.",
        "Within a pass, the linears compute it at once (``wgrad.asked``), but not so that it can be differentiated.",
    ),
    Clause(
        "demand",
        "A gradient that nobody asked for is dropped.",
        "A linear leaves a gradient for W only if the running backward accumulates gradients.",
    ),
    Clause(
        "place",
        "A backward within a forward accumulates gradients.",
        "Refused: the gradients of earlier microbatches wait, and would be added after it.",
    ),
    Clause(
        "derivatives",
        "The gradient of an input can be differentiated.",
        "What reaches the weight that way is added to the gradient that W computes.",
    ),
    Clause(
        "saving",
        "What a backward needs passes once through the saved-tensor hooks in force.",
        "W takes the input as upstream's backward gets it from there (``wgrad.saving``).",
    ),
    Clause(
        "versions",
        "A backward uses its operands as they were, or refuses them.",
        "A gradient that the same backward writes to later is copied (``wgrad.operands``). W refuses operands whose "
        "version has changed since B.",
    ),
    Clause(
        "lifetimes",
        "A backward frees its operands, also if the graph stays.",
        "The graph refers to no operand of W; the store does, and W drops them.",
    ),
)
"""The contract."""
