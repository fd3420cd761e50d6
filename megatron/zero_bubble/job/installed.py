"""Check for the packages of the extra ``train``, which training needs and planning does not."""

from importlib.util import find_spec

from megatron.zero_bubble.errors import UserError

INSTALL = "pip install 'megatron-zero-bubble[train]'"


def check_installed(*modules: str) -> None:
    """Check that these can be imported, without importing them.

    Raises:
        UserError: one of them is missing; planning alone does not need it.
    """
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise UserError(f"training needs {' and '.join(missing)}, not installed here; run {INSTALL}", everywhere=False)


def check_writer(save: str | None) -> None:
    """Check, if a job saves distributed checkpoints, for the package without which megatron-core's writers hang.

    Raises:
        UserError: it is missing.
    """
    if save and find_spec("psutil") is None:
        raise UserError(
            "--save needs the package psutil, without which megatron-core's writers hang; run pip install psutil"
        )
