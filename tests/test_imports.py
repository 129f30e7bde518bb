"""Proves the import rules that keep the two packages apart and the command quick.

python -m pytest tests/test_imports.py
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHARED = {
    "config",
    "runfolder",
    "schedule",
    "progress",
    "ranks",
    "errors",
    "leaving",
    "tasks",
    "ledger",
    "order",
    "storage",
    "rehearsal",
}
"""Modules of `training` that the launcher may import anywhere: free of torch, as the last test shows."""
OWNERS = {
    "omegaconf": {"launcher/reading/omega.py"},
    "submitit": {"launcher/executors.py"},
    "wandb": {"training/wandb_sink.py"},
    "fsspec": {"training/remote.py"},
}


def _imports(path: Path) -> list[tuple[str, bool]]:
    """(absolute module name, whether it is imported at the top of the file) of every import statement."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"{node.module}.{a.name}" for a in node.names] if "." not in node.module else [node.module]
        found += [(name, node in tree.body) for name in names]
    return found


def _files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", _files("launcher"), ids=lambda p: p.name)
def test_the_launcher_never_imports_torch_and_of_training_only_what_is_free_of_it(path: Path) -> None:
    for name, at_top in _imports(path):
        top, _, rest = name.partition(".")
        assert top != "torch", f"{path.name} imports {name}"
        if top == "training" and rest and rest.split(".")[0] not in SHARED:
            assert path.name in {"payload.py", "host.py"}, f"{path.name} imports {name}"
            assert not at_top, f"{path.name} imports {name} at its top"


@pytest.mark.parametrize("path", _files("training"), ids=lambda p: p.name)
def test_training_knows_neither_launcher_nor_scheduler(path: Path) -> None:
    for name, _ in _imports(path):
        top = name.partition(".")[0]
        assert top not in {"submitit", "omegaconf"}, f"{path.name} imports {name}"
        if top == "launcher":
            assert path.name == "__main__.py", f"{path.name} imports {name}"


@pytest.mark.parametrize("foreign", sorted(OWNERS))
def test_one_module_owns_each_foreign_package(foreign: str) -> None:
    users = {
        str(path.relative_to(ROOT))
        for package in ("launcher", "training")
        for path in _files(package)
        if any(name.partition(".")[0] == foreign for name, _ in _imports(path))
    }
    assert users == OWNERS[foreign]


@pytest.mark.parametrize(
    ("arguments", "forbidden"),
    [
        (["--help"], {"torch", "wandb", "submitit", "omegaconf", "yaml", "numpy"}),
        (["check", "configs/ddp_2node.yaml"], {"torch", "wandb", "submitit", "numpy"}),
        (["show", "configs/ddp_2node.yaml"], {"torch", "wandb", "submitit", "numpy"}),
        (["configs/ddp_2node.yaml", "--dry-run"], {"torch", "wandb", "submitit", "numpy"}),
    ],
    ids=["help", "check", "show", "dry-run"],
)
def test_quick_commands_import_nothing_slow(arguments: list[str], forbidden: set[str]) -> None:
    program = (
        "import sys, ddp_launcher\n"
        f"sys.argv = ['launch', *{arguments!r}]\n"
        "code = ddp_launcher.main()\n"
        f"slow = sorted({forbidden!r} & set(sys.modules))\n"
        "assert code == 0 and not slow, (code, slow)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_shared_training_modules_are_free_of_torch() -> None:
    imports = "; ".join(f"import training.{name}" for name in sorted(SHARED))
    program = f"import sys; {imports}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)
