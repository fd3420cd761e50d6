import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from megatron.zero_bubble.engine.import_hook import AfterImport, PostImportHook


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package with two modules; ``user`` imports a name from ``source``."""
    folder = tmp_path / "hooked_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "source.py").write_text("value = 1\n")
    (folder / "user.py").write_text("from hooked_package.source import value\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield "hooked_package"
    for name in [name for name in sys.modules if name.startswith("hooked_package")]:
        del sys.modules[name]


def double(module: ModuleType) -> None:
    module.value *= 2  # type: ignore[attr-defined]


def test_hook_runs_before_the_importer_sees_the_module(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [PostImportHook({f"{package}.source"}, double), *sys.meta_path])
    assert importlib.import_module(f"{package}.user").value == 2


def test_hook_leaves_other_modules_and_loaders_unchanged(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    hook = PostImportHook({f"{package}.source"}, lambda module: seen.append(module.__name__))
    monkeypatch.setattr(sys, "meta_path", [hook, *sys.meta_path])
    user = importlib.import_module(f"{package}.user")
    source = sys.modules[f"{package}.source"]
    assert seen == [source.__name__]
    assert "exec_module" not in vars(source.__spec__.loader)  # type: ignore[union-attr]
    assert type(user.__spec__.loader) is type(source.__spec__.loader)  # type: ignore[union-attr]


def test_removed_hook_does_nothing(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module is found while the hook is installed and executed after its removal."""
    hook = PostImportHook({f"{package}.source"}, double)
    monkeypatch.setattr(sys, "meta_path", [hook, *sys.meta_path])
    spec = importlib.util.find_spec(f"{package}.source")
    sys.meta_path.remove(hook)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.value == 1


def test_two_hooks_may_watch_one_module(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = [PostImportHook({f"{package}.source"}, double) for _ in range(2)]
    monkeypatch.setattr(sys, "meta_path", [*hooks, *sys.meta_path])
    assert importlib.import_module(f"{package}.user").value == 4


def test_after_import_waits_for_the_outermost_module(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``user`` imports ``source`` and goes on; then everything can be used, also as an attribute of its package."""
    complete: list[int] = []

    def then() -> None:
        namespace: dict[str, int] = {}
        exec(f"import {package}.user\nvalue = {package}.user.value", namespace)
        complete.append(namespace["value"])

    hook = AfterImport(f"{package}.", f"{package}.source", then)
    monkeypatch.setattr(sys, "meta_path", [hook, *sys.meta_path])
    importlib.import_module(package)
    assert complete == []
    importlib.import_module(f"{package}.user")
    assert complete == [1]
    assert hook not in sys.meta_path


def test_after_import_does_nothing_if_the_import_fails(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    hook = AfterImport(f"{package}.", f"{package}.source", lambda: calls.append("then"))
    monkeypatch.setattr(sys, "meta_path", [hook, *sys.meta_path])
    folder = Path(importlib.import_module(package).__file__ or "").parent
    (folder / "broken.py").write_text("from hooked_package.source import missing\n")
    importlib.invalidate_caches()
    # The import of ``source`` within that of ``broken`` succeeds, and is not the outermost one.
    with pytest.raises(ImportError, match="missing"):
        importlib.import_module(f"{package}.broken")
    assert calls == []
    importlib.import_module(f"{package}.user")
    assert calls == ["then"]
