"""Layering rules that .importlinter cannot express: which folders may use a name, and what a package must contain."""

import ast
import configparser
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "megatron" / "zero_bubble"
ROOT = "megatron.zero_bubble"


@pytest.mark.parametrize(
    ("name", "folders"),
    [
        ("torch.cuda", {"engine/platforms", "engine/kernels"}),
        ("megatron.training", {"integration/patching", "integration/megatron_lm"}),
        ("get_args", {"integration/patching"}),
    ],
)
def test_name_is_used_only_in_its_folders(name: str, folders: set[str]) -> None:
    paths = [
        path for path in PACKAGE.rglob("*.py") if not folders & {str(p) for p in path.relative_to(PACKAGE).parents}
    ]
    places = [
        f"{path.relative_to(PACKAGE)}:{line}: {used}"
        for path in sorted(paths)
        for line, used in names_in(path.read_text())
        if used == name or used.startswith(f"{name}.") or used.endswith(f".{name}")
    ]
    assert not places, f"{name} may be used only in {sorted(folders)}:\n" + "\n".join(places)


def test_names_in_finds_imports_and_attributes() -> None:
    source = "import torch.cuda\nfrom torch import cuda\ntorch.cuda.synchronize()\nx = 'torch.cuda'  # torch.cuda"
    assert sorted(line for line, name in names_in(source) if name == "torch.cuda") == [1, 2, 3]


def test_no_process_runs_a_module_of_a_higher_layer() -> None:
    """A module name in a string, as in ``[sys.executable, "-m", "..."]``, must be of the same or a lower layer."""
    places = [
        f"{path.relative_to(PACKAGE)}:{line}: {module}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, module in modules_in_strings(path.read_text())
        if layer_of(module) > layer_of(".".join([ROOT, *path.relative_to(PACKAGE).with_suffix("").parts]))
    ]
    assert not places, "strings name modules of a higher layer:\n" + "\n".join(places)


def test_modules_in_strings_finds_modules_in_commands() -> None:
    source = f"""'As in python -m {ROOT}.cli.'\nrun([python, "-m", "{ROOT}"])\nrun([python, "-m", "{ROOT}.cli.plan"])"""
    found = [module for _, module in modules_in_strings(source)]
    assert (
        [layer_of(module) for module in found]
        == [layer_of(f"{ROOT}.launch")] * 2
        > [layer_of(f"{ROOT}.integration.adapter.auto")] * 2
    )


def test_planning_does_not_import_the_rules_of_jobs() -> None:
    """A contract cannot say this, because a package holds both."""
    names = [name for path in (PACKAGE / "planning").glob("*.py") for _, name in names_in(path.read_text())]
    assert names
    assert not [name for name in names if name.startswith(f"{ROOT}.planning.job")]


def test_every_package_has_a_docstring() -> None:
    assert not (PACKAGE.parent / "__init__.py").exists(), (
        "megatron must stay a namespace package, shared with megatron-core"
    )
    for folder in {path.parent for path in PACKAGE.rglob("*.py")}:
        tree = ast.parse((folder / "__init__.py").read_text())
        assert ast.get_docstring(tree), f"{folder.name}/__init__.py has no docstring"


def names_in(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of everything imported or used, except in strings and comments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, ast.unparse(node)


def modules_in_strings(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of each string that consists of the name of one of our modules."""
    name = re.compile(rf"{re.escape(ROOT)}(\.[a-z]\w*)*")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and name.fullmatch(node.value):
            yield node.lineno, node.value


def layer_of(module: str) -> tuple[int, int]:
    """Return the layers of a module's wing and room in .importlinter, from below; the package is its ``__main__``."""
    wing, _, room = (module.removeprefix(ROOT).lstrip(".") or "__main__").partition(".")
    return layer_in(ROOT, wing), layer_in(f"{ROOT}.{wing}", room.partition(".")[0])


def layer_in(container: str, name: str) -> int:
    contracts = configparser.ConfigParser()
    contracts.read(REPOSITORY / ".importlinter")
    held = (contract for contract in contracts.values() if contract.get("containers", "").strip() == container)
    layers = [line for contract in held for line in contract["layers"].split("\n")[::-1]]
    return next((number for number, layer in enumerate(layers) if name in re.split(r"[ :|]+", layer)), 0)
