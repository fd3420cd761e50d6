"""Check for the packages of the extra ``train``, which training needs and planning does not."""

from importlib.util import find_spec
from typing import Any

from megatron.zero_bubble.core.errors import UserError

INSTALL = "pip install 'megatron-zero-bubble[train]'"


def check_installed(*modules: str) -> None:
    """Check that these can be imported, without importing them.

    Raises:
        UserError: one of them is missing; planning alone does not need it.
    """
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise UserError(f"training needs {' and '.join(missing)}, not installed here; run {INSTALL}", everywhere=False)


def missing_packages(args: Any) -> list[str]:
    """Return what a job of checked ``args`` needs that cannot be imported here.

    Planning never refuses a job for it, because the job runs on another machine.
    """
    writes = args.save and getattr(args, "ckpt_format", None) != "torch"
    return ["psutil"] if writes and find_spec("psutil") is None else []


def check_packages(args: Any) -> None:
    """Check, in a run, that nothing is missing.

    Raises:
        UserError: something is.
    """
    if missing_packages(args):
        raise UserError(
            "--save needs the package psutil, without which megatron-core's writers hang; run pip install psutil",
            everywhere=False,
        )
