"""What pages quote of a command is what the command prints."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
_BLOCKS = re.compile(r"```bash\n(.*?)```\n.*?```\n(.*?)```", re.DOTALL)


def test_the_dry_run_of_clusters_prints_what_the_page_says() -> None:
    page = (ROOT / "docs/clusters.md").read_text(encoding="utf-8")
    found = _BLOCKS.search(page)
    assert found is not None
    command, quoted = found.groups()
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_MAX_CONNECTIONS"}
    printed = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert printed.split("node 0: ")[0].splitlines() == quoted.split("node 0: ")[0].splitlines()
