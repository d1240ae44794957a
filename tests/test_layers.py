"""Imports point downwards, and heavy libraries stay inside their adapters. Read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
# Top to bottom; a module imports from its own room, from rooms in lower rows, and from the
# contract (`base`) of a neighbour in its row.
ROWS = [
    "launch config_reference __main__",
    "sweeps start",
    "cli",
    "overrides",
    "job",
    "run",
    "builder rerun",
    "starter preparing",
    "plan checks contracts search_path",
    "loops",
    "rollout weight_sync checkpoint",
    "engines trainers",
    "cluster tracking",
    "prm",
    "algorithms distillation rewards data models",
    "roles",
    "composition",
    "option_files",
    "config metrics functional memory",
    "debug",
    "profiling",
    "validation objective",
    "wording",
    "types",
    "fingerprint",
    "errors lazy arguments help",
]
ROW = {room: number for number, row in enumerate(ROWS) for room in row.split()}
# Library -> the folder that alone may import it.
ADAPTERS = {
    "ray": "rlpost/cluster",
    "vllm": "rlpost/engines",
    "megatron": "rlpost/trainers/megatron",
    "omegaconf": "rlpost/config.py rlpost/composition.py rlpost/cli.py "
    "rlpost/sweeps/callback.py rlpost/sweeps/grid.py launch.py",
    "mlflow": "rlpost/tracking",
}
FILES = [REPOSITORY / "launch.py", *sorted((REPOSITORY / "rlpost").rglob("*.py"))]


def imports(file: Path) -> Iterator[str]:
    """Full names of the modules that a file imports anywhere, also inside functions."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import; write the full name"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "LazyModule":
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant))


def room(name: str) -> str:
    """`rlpost.data.file.FileSource` -> `data`."""
    return name.split(".")[1] if "." in name else name


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(REPOSITORY).with_suffix("").parts)


def allowed(importer: str, imported: str) -> bool:
    if importer == imported or imported == "__init__":
        return True
    return ROW[importer] < ROW[imported]


def violations(file: Path) -> list[str]:
    importer = room(module_name(file))
    found = []
    for name in imports(file):
        if not name.startswith("rlpost.") or importer == "__init__":
            continue
        imported = room(name)
        neighbours = ROW[importer] == ROW[imported] and name.split(".")[2:3] == ["base"]
        if not allowed(importer, imported) and not neighbours:
            found.append(f"{importer} (row {ROW[importer]}) imports {name} (row {ROW[imported]})")
    return found


def test_every_module_has_a_row() -> None:
    rooms = {room(module_name(file)) for file in FILES} - {"__init__", "__main__"}
    assert rooms - set(ROW) == set()


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_imports_point_downwards(file: Path) -> None:
    assert violations(file) == []


@pytest.mark.parametrize("library", ADAPTERS)
def test_heavy_libraries_are_imported_only_by_their_adapters(library: str) -> None:
    homes = tuple(ADAPTERS[library].split())
    users = {
        path
        for file in FILES
        if any(name.split(".")[0] == library for name in imports(file))
        and not (path := file.relative_to(REPOSITORY).as_posix()).startswith(homes)
    }
    assert users == set()


def test_an_upward_import_would_be_found() -> None:
    assert not allowed("data", "loops")
    assert not allowed("engines", "trainers")
    assert allowed("loops", "data")
