"""Stand-ins for what Megatron-Bridge imports and a toy run on CPU ranks does not use.

Its package imports all of its model families at once, with TransformerEngine and Hugging Face's packages. The stand-in
of a module has every name, and each name is a class that can be inherited, called and used as a decorator. Packages
that are installed are not replaced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module, reload
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

_USED_MODELS = {"common", "gpt", "hybrid", "mamba", "decorators"}
_OUTSIDE = (
    "accelerate",
    "comet_ml",
    "datasets",
    "diffusers",
    "einops",
    "huggingface_hub",
    "hydra",
    "megatron.energon",
    "mlflow",
    "modelopt",
    "omegaconf",
    "peft",
    "regex",
    "safetensors",
    "tqdm",
    "transformers",
    "wandb",
    "webdataset",
)
# No other module of this package: megatron-core would take its writer of checkpoints.
_RESILIENCY = ("nvidia_resiliency_ext", "nvidia_resiliency_ext.inprocess")
_VALUES: dict[str, dict[str, Any]] = {
    "modelopt.torch.distill.plugins.megatron": {
        "get_tensor_shapes_adjust_fn_for_distillation": lambda *_, **__: None  # as for a model without a teacher
    }
}


class _Names(type):
    """Classes whose attributes are classes of the same kind."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, made := _named(name, cls.__module__))
        return made

    def __or__(cls, other: Any) -> Any:
        return cls


def _named(name: str, module: str) -> Any:
    return _Names(name, (_Absent,), {"__module__": module})


class _Absent(metaclass=_Names):
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __init_subclass__(cls, **_: Any) -> None:
        pass

    def __class_getitem__(cls, _: Any) -> Any:
        return cls

    def __call__(self, *args: Any, **_: Any) -> Any:
        """As a decorator, return what is decorated."""
        return args[0] if args else None


class _Module(ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, made := _named(name, self.__name__))
        return made


def absent_module(name: str) -> ModuleType:
    """A module that has every name."""
    return _Module(name)


class _Finder(MetaPathFinder, Loader):
    """Finds stand-ins for the modules ``is_absent``."""

    def __init__(self, is_absent: Callable[[str], bool]) -> None:
        self._is_absent = is_absent

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if self._is_absent(name) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        values: Mapping[str, Any] = _VALUES.get(module.__name__, {})
        vars(module).update(values)


def stand_in(bridge: Path) -> None:
    """Put stand-ins in place for the checkout ``bridge``, before Megatron-Bridge is imported."""
    models = bridge / "src/megatron/bridge/models"
    families = [f"megatron.bridge.models.{path.name}" for path in models.iterdir() if path.is_dir()]
    unused = [name for name in families if name.rpartition(".")[2] not in _USED_MODELS]
    adapters = ["megatron.bridge.peft.lora_layers", "megatron.bridge.peft.canonical_lora"]
    sys.meta_path.insert(0, _Finder(_within(["megatron.bridge.diffusion", *adapters, *unused])))
    stand_in_for(*_OUTSIDE)
    sys.meta_path.append(_Finder(_RESILIENCY.__contains__))


def stand_in_for(*packages: str) -> None:
    """Put stand-ins in place for those of the packages that are not installed."""
    sys.meta_path.append(_Finder(_within(packages)))  # behind the finders of what is installed


def lora(bridge: Path) -> Any:
    """The class of LoRA with its real layers, of a package that has been imported with stand-ins for them. Those that
    inherit from TransformerEngine's are not used.
    """
    name, engine = "megatron.bridge.peft.lora_layers", ("transformer_engine", "transformer_engine.pytorch")
    spec = spec_from_file_location(name, bridge / "src/megatron/bridge/peft/lora_layers.py")
    assert spec is not None and spec.loader is not None
    sys.modules[name] = layers = module_from_spec(spec)
    absent = {each: _Module(each) for each in engine if each not in sys.modules}
    sys.modules.update(absent)
    spec.loader.exec_module(layers)
    for each in absent:
        del sys.modules[each]
    utils: Any = import_module("megatron.bridge.peft.utils")
    utils.HAVE_TE = False  # it takes megatron-core's names for installed classes
    return reload(import_module("megatron.bridge.peft.lora")).LoRA


def _within(names: Collection[str]) -> Callable[[str], bool]:
    """Whether a module has one of ``names``, or is in a package that has one and is a stand-in."""

    def is_absent(module: str) -> bool:
        package = module.rpartition(".")[0]
        return module in names or (isinstance(sys.modules.get(package), _Module) and is_absent(package))

    return is_absent
