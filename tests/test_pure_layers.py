"""The layers below the runtime must not import torch, so that planning works without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import megatron.zero_bubble

PACKAGE = Path(megatron.zero_bubble.__file__).parent
PURE = ("__init__", "__main__", "core", "planning")


def test_planning_does_not_load_torch() -> None:
    """Import every module of both wings and the command in one new process."""
    files = [
        path for name in PURE for path in [PACKAGE / f"{name}.py", *(PACKAGE / name).rglob("*.py")] if path.exists()
    ]
    names = [".".join(path.relative_to(PACKAGE.parents[1]).with_suffix("").parts) for path in files]
    assert "megatron.zero_bubble.core.schedules.zb_h2" in names
    imports = "\n".join(f"importlib.import_module({name.removesuffix('.__init__')!r})" for name in names)
    code = f"import importlib, sys\n{imports}\nprint([name for name in ('torch', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
