"""The keys of a costs file besides the terms of costs (``core/costs/terms.py``); docs/costs-json.md prints both."""

from __future__ import annotations

from typing import Literal, NamedTuple


class CostKey(NamedTuple):
    """A key whose value is not one figure.

    Attributes:
        name: the key.
        form: the type of its value, in words.
        meaning: what the value says.
        section: where the documentation has it: with figures of passes, or with costs per layer.
    """

    name: str
    form: str
    meaning: str
    section: Literal["passes", "layers"]


COST_KEYS = (
    CostKey(
        "links",
        "list of `[from rank, to rank, ms]`, optional",
        "transfers that differ from `comm_ms`, whatever the stages are",
        "passes",
    ),
    CostKey(
        "experts",
        "object, optional",
        "the all-to-alls and the computation of experts, of which the passes consist ([its keys](experts.md#costs)); "
        "each is a figure per stage",
        "passes",
    ),
    CostKey(
        "facts",
        "object, optional",
        "the [facts of the job](plan-json.md#facts-of-the-job) that was measured; readers name those that differ",
        "passes",
    ),
    CostKey(
        "layers",
        "list of strings, or a string",
        "the kind of every layer, in the order of the model. For a [hybrid model](megatron-lm.md#hybrid-models) it may "
        'be the pattern of its layers without `|`, such as `"M-M*"`, whose letters are the kinds: `parts` then has '
        '`"M"`, `"-"` and `"*"`',
        "layers",
    ),
    CostKey(
        "parts",
        "object",
        "per kind, the terms of one layer: those of the table above that are known per layer. `forward_ms`, "
        "`backward_ms` and `wgrad_ms` are required; `activation` and `wgrad` are in all kinds or none. `embedding`, "
        "and `loss` (the output layer with the loss), are optional parts, whose missing figures are 0",
        "layers",
    ),
    CostKey(
        "layers_per_stage",
        "list of integers, or of letters",
        "the other form, which a run records: the layers that each stage of the lists had. The layers of a stage "
        'share its figures equally; in a hybrid model (`["M-M*", "M-ME"]`), as layers of their letters do on all '
        "stages together, as far as these tell letters apart. Those of the first and of the last stage are as the "
        "mean of the stages between; what these two take beyond their layers is the embedding's, and the output "
        "layer's. A file of only two stages cannot tell the embedding from layers: it is assumed to take no time, "
        "and `plan` and `compare` say so",
        "layers",
    ),
    *(
        CostKey(
            end,
            "object, optional, with `layers_per_stage`",
            f"figures of the {what}, as in `parts`; without them, they are derived as above, and they may not take "
            "more than their stage. A run records what it has derived; a better figure can be written by hand",
            "layers",
        )
        for end, what in (("embedding", "embedding"), ("loss", "output layer with the loss"))
    ),
)
