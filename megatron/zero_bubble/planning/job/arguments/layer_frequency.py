"""Read ``--moe-layer-freq`` of a Megatron-LM job: a number, or an expression of lists, as in ``([0]*3+[1]*58)``."""

from __future__ import annotations

import argparse
import ast

from megatron.zero_bubble.core.ir.sizes import MOST_LAYERS


def layer_frequency(text: str) -> int | list[int]:
    """Every how many layers one has experts, or whether each has, by 1 or 0.

    Raises:
        ArgumentTypeError: for another form.
    """
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"it must be a number, or lists of 0 and 1 with + and *, as in [0]*3+[1]*58; got {text!r}; correct it"
        ) from error


def _value(node: ast.expr) -> int | list[int]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        values = [_value(each) for each in node.elts]
        return [each for each in values if isinstance(each, int)]
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int) and right <= MOST_LAYERS:
            return left * right
    raise ValueError("neither a number nor a list")
