"""Tests of the bench of weight gradients: the products of other packages, and their rows on the page."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch

from bench.sections import SECTIONS
from bench.wgrad import installed_variants


def install(patch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.__dict__.update(content)
    patch.setitem(sys.modules, name, module)


def gemm(x: torch.Tensor, dy: torch.Tensor, *, out: torch.Tensor, layout: str, accumulate: bool, **rest: Any) -> None:
    assert layout == "NT" and accumulate and rest == {"out_dtype": torch.float32, "grad": True}
    out.addmm_(dy.t(), x)


def gemm_with_workspace(*operands: torch.Tensor, workspace: str, **options: Any) -> None:
    assert workspace == "the workspace"
    gemm(*operands, **options)  # type: ignore[misc]


@pytest.mark.parametrize("of_engine", [gemm, gemm_with_workspace])
def test_products_of_installed_packages_accumulate(monkeypatch: pytest.MonkeyPatch, of_engine: Any) -> None:
    """Each is called as its package expects: TransformerEngine's with its own workspace, where it takes one."""

    def of_apex(x: torch.Tensor, dy: torch.Tensor, main_grad: torch.Tensor) -> None:
        main_grad.addmm_(dy.t(), x)

    install(monkeypatch, "fused_weight_gradient_mlp_cuda", wgrad_gemm_accum_fp32=of_apex)
    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.module"):
        install(monkeypatch, name)
    install(monkeypatch, "transformer_engine.pytorch.cpp_extensions", general_gemm=of_engine)
    install(monkeypatch, "transformer_engine.pytorch.module.base", get_workspace=lambda: "the workspace")
    x, dy, main_grad = torch.randn(5, 3), torch.randn(5, 2), torch.zeros(2, 3)
    variants = installed_variants([x], [dy], [main_grad])
    assert list(variants) == ["apex", "transformer_engine"]
    for count, run in enumerate(variants.values(), 1):
        run()
        torch.testing.assert_close(main_grad, count * (dy.t() @ x))


def test_packages_that_are_not_installed_have_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.wgrad.find_spec", lambda name: None)
    assert installed_variants([], [], []) == {}


@pytest.mark.parametrize("variant, named", [("apex", True), ("fused", False)])
def test_page_explains_the_products_of_other_packages(variant: str, named: bool) -> None:
    settings = {"hidden_size": 1, "tokens": 1, "rounds": 1, "device": "cuda", "threads": 1}
    text = SECTIONS["wgrad-cuda"].text({**settings, "rows": [{"variant": variant}]}, {})
    assert ('; apex accumulate as "fused" does' in text) == named
