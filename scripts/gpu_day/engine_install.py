"""Join the pieces of TransformerEngine's library, install it, and build its torch extension for this interpreter."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from gpu_day import install, step


def main() -> int:
    """Install into the folder that ``gpu_day.sh`` puts on Python's path."""
    options = step.parser(__doc__).parse_args()
    packages = install.PACKED / "engine"
    packages.mkdir(exist_ok=True)
    wheel = join(sorted(install.PACKED.glob("piece-*/engine/*.part-*")), packages)
    others = sorted(install.PACKED.glob("piece-*/engine/*.whl"))
    install.install([wheel, *others])
    sources = sorted(install.PACKED.glob("piece-*/engine/*.tar.gz"))
    if sources:
        install.install(sources, "--no-build-isolation")
    subprocess.run([sys.executable, "-c", "import transformer_engine.pytorch"], check=True)
    step.write(options.output, {"version": version("transformer-engine-cu13")})
    return 0


def join(parts: Sequence[Path], folder: Path) -> Path:
    """Join the parts of one file, which are named NAME.part-0-of-5 and so on; return the file.

    Raises:
        SystemExit: a part is missing.
    """
    numbers = sorted(int(part.name.split("-")[-3]) for part in parts)
    count = int(parts[0].name.split("-")[-1]) if parts else 1
    if numbers != list(range(count)):
        raise SystemExit(
            f"needs parts 0 to {count - 1} of TransformerEngine, got {numbers}; carry all of build/gpu_day/piece-*"
        )
    file = folder / parts[0].name.rpartition(".part-")[0]
    with file.open("wb") as stream:
        for part in sorted(parts, key=lambda path: int(path.name.split("-")[-3])):
            stream.write(part.read_bytes())
    return file


if __name__ == "__main__":
    sys.exit(main())
