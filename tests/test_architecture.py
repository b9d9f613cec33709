"""Imports point one way, and only the device knows CuPy."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "minineo"
MAY_IMPORT = {
    "transformer": set(),
    "cuda": {"transformer"},
    "cores": {"transformer"},
    "device": {"transformer", "cores", "cuda"},
    "checkpoints": {"transformer", "device"},
    "generation": {"transformer", "device", "checkpoints"},
    "study": {"transformer", "cores", "cuda", "device", "checkpoints", "generation"},
    "__init__": {"transformer", "device", "checkpoints", "generation", "study"},
    "cli": {"transformer", "device", "checkpoints", "generation", "study", "__init__"},
}
FILES = sorted(PACKAGE.rglob("*.py"))


def part_of(path):
    """The part of the package that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path):
    """Dotted names of all that a file imports, relative ones made absolute."""
    package = ["minineo", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def test_every_part_of_the_package_is_known():
    assert {part_of(path) for path in FILES} == set(MAY_IMPORT)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    part = part_of(path)
    for name in imports_of(path):
        if name.startswith("minineo."):
            other = name.split(".")[1]
            other = other if other in MAY_IMPORT else "__init__"
            assert other == part or other in MAY_IMPORT[part], f"{path} imports {name}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "transformer").glob("*.py")))
def test_the_transformer_needs_numpy_and_the_standard_library_alone(path):
    for name in imports_of(path):
        root = name.split(".")[0]
        assert root in {"minineo", "numpy"} or root in sys.stdlib_module_names, name


def test_only_the_device_imports_cupy():
    importers = {
        path.name for path in FILES if "cupy" in {n.split(".")[0] for n in imports_of(path)}
    }
    assert importers == {"device.py"}


def test_importing_the_package_loads_neither_torch_nor_a_plotting_library():
    code = "import minineo, sys; print({'torch', 'transformers', 'matplotlib', 'cupy'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
