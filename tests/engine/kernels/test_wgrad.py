"""Compare the weight-gradient ops, compiled and in plain torch, with float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble.engine.kernels import reference, select

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


def compiled(device: str) -> Any:
    kernels = select(device)
    assert kernels.words == "compiled", "the tests require compiled ops"
    return kernels.ops


def implementations(device: str) -> tuple[Any, Any]:
    return compiled(device), reference


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the same values with another memory layout."""
    if layout == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "a slice":
        wide = tensor.new_zeros(*tensor.shape[:-1], tensor.shape[-1] + 3)
        wide[..., 1 : 1 + tensor.shape[-1]] = tensor
        return wide[..., 1 : 1 + tensor.shape[-1]]
    if layout == "every second row":
        return torch.stack((tensor, tensor), dim=1)[:, 0]
    return tensor


@st.composite
def products(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw input, grad_output, main_grad and bias_grad on the CPU, with odd shapes and with no tokens or features."""
    size = st.integers(0, 40)
    leading = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    width, out = draw(size), draw(size)
    dtype = draw(st.sampled_from(DTYPES))
    grad_dtype = draw(st.sampled_from((torch.float32, dtype)))
    layouts = st.sampled_from(("contiguous", "transposed", "a slice", "every second row"))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    x = laid_out(noise(*leading, width).to(dtype), draw(layouts))
    grad_output = laid_out(noise(*leading, out).to(dtype), draw(layouts))
    main_grad = laid_out(noise(out, width).to(grad_dtype), draw(st.sampled_from(("contiguous", "a slice"))))
    return x, grad_output, main_grad, noise(out).to(grad_dtype)


@pytest.fixture
def exact_reductions() -> Iterator[None]:
    """By default, torch on GPUs adds the parts of a product in its narrow dtype, so the reference rounds repeatedly."""
    settings = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = [getattr(settings, name) for name in names]
    for name in names:
        setattr(settings, name, False)
    yield
    for name, value in zip(names, before, strict=True):
        setattr(settings, name, value)


def assert_rounded_once(got: torch.Tensor, exact: torch.Tensor, scale: torch.Tensor) -> None:
    """Check that ``got`` is ``exact``, accumulated in float32 and rounded once.

    An accumulation in float32 is exact to 1e-6 of the sum of magnitudes, or to 4e-6 on tensor cores, which truncate.
    """
    rounding = 0.0 if got.dtype is torch.float32 else torch.finfo(got.dtype).eps / 2
    error = (got.double() - exact).abs()
    accumulation = 4e-6 if got.is_cuda else 1e-6
    assert (error <= accumulation * scale + rounding * exact.abs() * 1.001 + 1e-7).all(), error.max()


@pytest.mark.usefixtures("exact_reductions")
@pytest.mark.parametrize("device", DEVICES)
@given(product=products())
def test_ops_equal_float64(device: str, product: tuple[torch.Tensor, ...]) -> None:
    x, grad_output, main_grad, bias_grad = (tensor.to(device) for tensor in product)
    rows, grad_rows = (t.double().reshape(t.shape[:-1].numel(), t.shape[-1]) for t in (x, grad_output))
    exact = main_grad.double() + grad_rows.t() @ rows
    scale = main_grad.double().abs() + grad_rows.t().abs() @ rows.abs()
    bias, bias_scale = bias_grad.double() + grad_rows.sum(0), bias_grad.double().abs() + grad_rows.abs().sum(0)
    for ops in implementations(device):
        wide = main_grad.new_zeros(main_grad.shape[0], main_grad.shape[1] + 2)
        one, many, sums = wide[:, : main_grad.shape[1]].copy_(main_grad), main_grad.clone(), bias_grad.clone()
        ops.wgrad_accumulate(x, grad_output, one)
        ops.wgrad_accumulate_many([x], [grad_output], [many], [sums])
        assert_rounded_once(one, exact, scale)
        assert_rounded_once(many, exact, scale)
        assert_rounded_once(sums, bias, bias_scale)
        assert not wide[:, main_grad.shape[1] :].any(), "the op must write only to the gradient"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_more_tokens_than_one_block(device: str, dtype: torch.dtype) -> None:
    """There are more tokens than the op processes at a time."""
    x, grad_output = (torch.randn(3, 700, features, device=device).to(dtype) for features in (33, 17))
    rows, grad_rows = x.double().reshape(-1, 33), grad_output.double().reshape(-1, 17)
    for ops in implementations(device):
        grad = torch.ones(17, 33, device=device)
        ops.wgrad_accumulate(x, grad_output, grad)
        assert_rounded_once(grad, 1 + grad_rows.t() @ rows, 1 + grad_rows.t().abs() @ rows.abs())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulate_many_equals_single_calls(device: str, dtype: torch.dtype) -> None:
    """Two weights, one used three times, one use without a bias: same bits as separate calls.

    The separate calls have the same biases: on CUDA, a product has another kernel if the kernel also sums a bias.
    """
    ops = compiled(device)
    inputs = [torch.randn(50, 24, device=device).to(dtype) for _ in range(4)]
    grad_outputs = [torch.randn(50, 16, device=device).to(dtype) for _ in range(4)]
    grads = [torch.randn(16, 24, device=device) for _ in range(2)]
    sums = torch.zeros(16, device=device)
    expected, which = [grad.clone() for grad in grads], (0, 1, 0, 0)
    biases = [sums, sums, sums.new_empty(0), sums]
    for x, grad_output, i, bias in zip(inputs, grad_outputs, which, biases, strict=True):
        ops.wgrad_accumulate_many([x], [grad_output], [expected[i]], [bias.clone()])
    ops.wgrad_accumulate_many(inputs, grad_outputs, [grads[i] for i in which], biases)
    assert all(torch.equal(*pair) for pair in zip(grads, expected, strict=True))
    assert torch.allclose(sums, sum(grad_outputs[i].float().sum(0) for i in (0, 1, 3)), atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_ops_are_deterministic(device: str, dtype: torch.dtype) -> None:
    x, grad_output = (torch.randn(300, features, device=device).to(dtype) for features in (129, 65))
    results = [torch.zeros(65, 129, device=device) for _ in range(3)]
    for grad in results:
        compiled(device).wgrad_accumulate(x, grad_output, grad)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


X, DY, GRAD = torch.ones(6, 4), torch.ones(6, 3), torch.zeros(3, 4)
BUFFER = torch.zeros(64)

REFUSED = {
    "float64": ((X.double(), DY.double(), GRAD), "input must be float32, bfloat16 or float16; got Double"),
    "two dtypes": ((X, DY.half(), GRAD), "grad_output must have the dtype of the input, Float; got Half"),
    "a narrow grad": ((X, DY, GRAD.half()), "main_grad must have dtype float32 or the dtype of the input.* got Half"),
    "shape of the grad": ((X, DY, GRAD.t()), r"must have the shape of its parameter, \[3, 4\]; got \[4, 3\]"),
    "tokens": ((X, DY[:5], GRAD), r"the same number of tokens; got shapes \[6, 4\] and \[5, 3\]"),
    "a scalar": ((torch.tensor(1.0), DY, GRAD), "input needs at least one dimension, the features; got a scalar"),
    "a transposed grad": ((X, DY, torch.zeros(4, 3).t()), r"rows of unit stride; got strides \[1, 3\]"),
    "an expanded grad": ((X, DY, torch.zeros(1, 4).expand(3, 4)), r"must not overlap itself; got strides \[0, 1\]"),
    "aliasing": ((BUFFER[:24].view(6, 4), DY, BUFFER[20:32].view(3, 4)), "must not share memory with an input"),
}


@pytest.mark.parametrize("arguments, sentence", REFUSED.values(), ids=REFUSED)
def test_invalid_arguments_are_rejected(arguments: tuple[torch.Tensor, ...], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        compiled("cpu").wgrad_accumulate(*arguments)
    assert not GRAD.any() and not BUFFER.any(), "a rejected call must not write"


@pytest.mark.gpu
def test_tensors_on_two_devices_are_rejected() -> None:
    with pytest.raises(ValueError, match="grad_output must be on the device of the input, cuda:0; got cpu"):
        compiled("cuda").wgrad_accumulate(X.cuda(), DY, GRAD.cuda())


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (([X], [DY, DY], [GRAD], []), "inputs, grad_outputs and main_grads must have the same length; got 1, 2"),
        (([X, X], [DY, DY], [GRAD, GRAD], [DY[0]]), "one tensor per input .*; got 1 for 2 inputs"),
        (([X], [DY], [GRAD], [DY[0]]), "must not share memory with a grad_output"),
        (([X, X], [DY, DY], [BUFFER[:12].view(3, 4), BUFFER[8:20].view(3, 4)], []), "with another gradient"),
        (([X], [DY], [GRAD], [torch.zeros(4)]), r"bias_grad must have the shape of its parameter, \[3\]"),
    ],
)
def test_accumulate_many_rejects_invalid_arguments(arguments: tuple[list[torch.Tensor], ...], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        compiled("cpu").wgrad_accumulate_many(*arguments)


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    """Schemas declare mutated arguments, and the ops accept fake tensors."""
    x, grad_output, grad = (tensor.to(device) for tensor in (X, DY, GRAD.clone()))
    compiled(device)
    ops = torch.ops.zero_bubble
    torch.library.opcheck(ops.wgrad_accumulate.default, (x, grad_output, grad))
    torch.library.opcheck(
        ops.wgrad_accumulate_many.default, ([x, x], [grad_output, grad_output], [grad, grad.clone()], [])
    )
