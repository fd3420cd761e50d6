"""The playground's page: HTML, CSS and JavaScript, combined into one file that loads nothing else."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any

_STYLE = re.compile(r'<link rel="stylesheet" href="([a-z]+\.css)">')
_SCRIPT = re.compile(r'<script src="([a-z]+\.js)"></script>')


def build_page(catalogue: dict[str, Any]) -> str:
    """Inline all files that ``index.html`` names, and define ``catalogue`` as the page's constant ``CATALOGUE``."""
    folder = files(__package__)

    def text(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    # </script> would end the script even inside a string, so "<" is escaped.
    known = f"const CATALOGUE = {json.dumps(catalogue)};\n".replace("<", "\\u003c")
    page = _STYLE.sub(lambda match: f"<style>\n{text(match[1])}</style>", text("index.html"))
    page = page.replace("<!-- catalogue -->", f"<script>\n{known}</script>")
    return _SCRIPT.sub(lambda match: f"<script>\n{text(match[1])}</script>", page)
