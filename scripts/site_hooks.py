"""MkDocs hook: add the playground's page of precomputed settings to the site, without writing it to docs/."""

from __future__ import annotations

from functools import cache

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from megatron.zero_bubble.cli.playground.static import static_page

PAGE = "playground-static.html"
_planned = cache(static_page)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page, which is planned once per process."""
    files.append(File.generated(config, PAGE, content=_planned()))
    return files
