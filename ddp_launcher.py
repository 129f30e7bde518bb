"""The door: loads our `launcher` and `training` packages by their place on disk, whatever else bears these names.

A user's folder may hold a `training/` or `launcher/` of its own and be on the import path. The console script and the
ranks therefore enter here, under a name that is ours alone:

1. `open_door()` makes `launcher` and `training` mean this distribution's packages, from their own folder.
2. `step_aside()`, called just before a user's code is imported, gives these names back where the user's import path
   has packages of the same name: ours go on as `ddp_launcher.launcher` and `ddp_launcher.training`.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import FunctionType, ModuleType

_HOME = Path(__file__).resolve().parent
_OURS = ("training", "launcher")
__path__ = [str(_HOME)]  # makes this module a package, so that ddp_launcher.training is importable


def open_door() -> None:
    """Bind `launcher` and `training` in sys.modules to our packages, before any path entry can claim them."""
    for name in _OURS:
        if name in sys.modules and _is_ours(sys.modules[name], name):
            continue
        folder = _HOME / name
        spec = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)


def step_aside(path: list[str]) -> list[str]:
    """Give our package names back to the user where `path` has packages of the same name; return those names.

    Ours stay alive as `ddp_launcher.NAME`: their modules are re-registered and renamed, so relative imports that run
    later still find their siblings.
    """
    taken = [name for name in _OURS if _found_elsewhere(name, path)]
    for name in taken:
        for key in sorted(k for k in sys.modules if k == name or k.startswith(name + ".")):
            module = sys.modules.pop(key)
            _rename(module, f"{__name__}.{key}")
    return taken


def _is_ours(module: ModuleType, name: str) -> bool:
    return str(_HOME / name) in [str(Path(p).resolve()) for p in getattr(module, "__path__", [])]


def _found_elsewhere(name: str, path: list[str]) -> bool:
    spec = PathFinder.find_spec(name, path)
    if spec is None:
        return False
    places = list(spec.submodule_search_locations or [])
    if spec.origin is None and not any(list(Path(p).glob("*.py")) for p in places):
        return False  # a folder of that name without Python code is no package of the user's
    return not any(Path(p).resolve() == _HOME / name for p in places)


def _rename(module: ModuleType, name: str) -> None:
    """Rename a module and what it defines: type hints and pickles look a class's module up by its name."""
    for value in vars(module).values():
        if getattr(value, "__module__", None) == module.__name__ and isinstance(value, (type, FunctionType)):
            value.__module__ = name
    module.__name__ = name
    is_package = hasattr(module, "__path__")
    module.__package__ = name if is_package else name.rpartition(".")[0]
    if module.__spec__ is not None:
        module.__spec__.name = name
    sys.modules[name] = module
    parent, _, leaf = name.rpartition(".")
    setattr(sys.modules[parent], leaf, module)


def main() -> int:
    """The console script `launch`."""
    open_door()
    from launcher.cli import main as launch

    return launch(sys.argv[1:])


if __name__ == "__main__":
    # Run as a file by absolute path: the name under which the rest of the program can import this module.
    sys.modules["ddp_launcher"] = sys.modules["__main__"]
    __name__ = "ddp_launcher"
    open_door()
    from launcher.entry import main as entry

    sys.exit(entry(sys.argv[1:]))
