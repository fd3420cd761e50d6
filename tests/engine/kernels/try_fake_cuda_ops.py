"""Runs the CUDA ops with the fake cuBLASLt in a process of their own; the argument is the library to load."""

from __future__ import annotations

import ctypes
import sys
from itertools import count

import pytest
import torch

torch.ops.load_library(sys.argv[1])
OPS = torch.ops.fake_cuda
FAKE = ctypes.CDLL(sys.argv[1])
NO_FAULT, *FAULTS, EXECUTION_FAILS = range(6)  # see fake_cublaslt.h
_tokens = count(7)


def products(dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], ...]:
    """Two products of a shape that has not occurred, since refusals are remembered by shape."""
    tokens = next(_tokens)
    integers = [torch.randint(-3, 4, (tokens, size)).to(dtype) for size in (4, 4, 3, 3)]
    return integers[:2], integers[2:], [torch.ones(3, 4), torch.ones(3, 4)], [torch.ones(3), torch.ones(3)]


def check(dtype: torch.dtype = torch.float32) -> None:
    inputs, grad_outputs, main_grads, bias_grads = products(dtype)
    OPS.wgrad_accumulate_many(inputs, grad_outputs, main_grads, bias_grads)
    for x, grad_output, grad, bias in zip(inputs, grad_outputs, main_grads, bias_grads, strict=True):
        assert torch.equal(grad, 1 + grad_output.float().t() @ x.float())
        assert torch.equal(bias, 1 + grad_output.float().sum(0))


def main() -> None:
    check()
    assert not FAKE.fake_was_tf32()
    for fault in FAULTS:
        FAKE.fake_set_fault(fault)
        check()
    FAKE.fake_set_fault(EXECUTION_FAILS)
    with pytest.raises(RuntimeError, match="failed in cuBLASLt: refused; use --no-zero-bubble-fuse-wgrad"):
        check()  # half a gradient may have been written
    FAKE.fake_set_fault(NO_FAULT)
    if hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # since torch 2.9
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    else:
        torch.backends.cuda.matmul.allow_tf32 = True
    check(torch.bfloat16)
    assert not FAKE.fake_was_tf32()
    check()
    assert FAKE.fake_was_tf32()

    kept = [OPS.workspace_of(stream) for stream in (1, 2, 1, 2, 9, 9)]
    assert kept[0].data_ptr() == kept[2].data_ptr() and kept[1].data_ptr() == kept[3].data_ptr()
    assert len({workspace.data_ptr() for workspace in kept}) == 4, "streams must not share, captures must not keep"


if __name__ == "__main__":
    main()
