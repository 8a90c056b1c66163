"""The shape of the package: imports point one way, files stay readable, importing is harmless."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import depthroute

PACKAGE = Path(depthroute.__file__).parent
TESTS = Path(__file__).parent.parent

# leftmost first; names in one group may import each other
ORDER = [
    {
        "_version",
        "errors",
        "checks",
        "files",
        "json_shape",
        "methods",
        "plan",
        "schedule",
        "config",
        "visible",
    },
    {"ops"},
    {"nn"},
    {"models", "presets"},
    {"parallel"},
    {"data"},
    {"runs"},
    {"train"},
    {"evaluate"},
    {"diagnostics"},
    {"bench"},
    {"serving"},
    {"cli", "__main__"},
]
MAY_IMPORT_TRANSFORMERS = {"models", "evaluate", "data", "diagnostics", "presets", "bench"}
MAY_IMPORT_TRANSFORMERS |= {"serving", "cli"}
SOURCES = sorted(PACKAGE.rglob("*.py"))
MODULES = [path for path in SOURCES if path != PACKAGE / "__init__.py"]


def identify(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def part_of(path: Path) -> str:
    """``ops`` for ops/mix.py, ``config`` for config.py."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def rank(part: str) -> int:
    for position, group in enumerate(ORDER):
        if part in group:
            return position
    raise AssertionError(f"{part!r} has no place in ORDER; say what it may import")


def imported(path: Path) -> set[str]:
    """Every module a file names in an import statement, anywhere in it, fully dotted."""
    package = ["depthroute", *path.relative_to(PACKAGE).parent.parts]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", MODULES, ids=identify)
def test_imports_point_one_way(path):
    here = rank(part_of(path))
    for name in imported(path):
        root, _, rest = name.partition(".")
        if root == "depthroute" and rest:
            part = rest.split(".")[0]
            known = (PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").exists()
            assert known, f"{name} comes from the package itself; import it from where it is made"
            assert rank(part) <= here, f"{identify(path)} imports {name}, which is to its right"


@pytest.mark.parametrize("path", MODULES, ids=identify)
def test_transformers_is_imported_only_where_models_are(path):
    roots = {name.split(".")[0] for name in imported(path)}
    if part_of(path) not in MAY_IMPORT_TRANSFORMERS:
        assert "transformers" not in roots


@pytest.mark.parametrize("part", ["errors.py", "files.py", "plan.py", "config.py", "ops", "nn"])
def test_the_core_needs_nothing_but_torch(part):
    paths = (PACKAGE / part).rglob("*.py") if (PACKAGE / part).is_dir() else [PACKAGE / part]
    for path in paths:
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):  # annotations alone may name jaxtyping
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                node.body = []
        roots = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                roots |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                roots.add((node.module or "").split(".")[0])
        allowed = {"torch", "depthroute", "triton", *sys.stdlib_module_names}
        assert roots <= allowed, f"{identify(path)} imports {sorted(roots - allowed)}"


def test_what_only_developers_run_stays_outside_of_the_package():
    """The wheel holds src/ alone; what is installed must not reach for the rest."""
    settings = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())
    assert settings["tool"]["setuptools"]["packages"]["find"] == {"where": ["src"]}
    assert [path.name for path in PACKAGE.parent.glob("*/__init__.py")] == ["__init__.py"]
    outside = {"bench", "tests", "docs", "examples"}
    for path in SOURCES:
        assert not outside & {name.split(".")[0] for name in imported(path)}, identify(path)


def test_no_file_is_longer_than_600_lines():
    files = [*SOURCES, *TESTS.rglob("*.py"), *(TESTS.parent / "bench").glob("*.py")]
    assert len(files) > 20
    lengths = {str(path): len(path.read_text().splitlines()) for path in files}
    assert {name: n for name, n in lengths.items() if n > 600} == {}


def test_every_file_of_the_quick_check_is_there():
    """CI runs everything and not `make check`, so it would not notice a file that moved."""
    root = TESTS.parent
    listed = re.findall(r"tests/\S+\.py", (root / "Makefile").read_text())
    assert len(listed) > 10 and [path for path in listed if not (root / path).is_file()] == []


def run_python(code: str) -> str:
    root = str(PACKAGE.parent)
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"import sys; sys.path.insert(0, {root!r})\n{code}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_ops_and_nn_work_without_transformers_installed():
    out = run_python(
        """
for name in ("transformers", "triton", "safetensors", "numpy", "typer", "rich", "jaxtyping"):
    sys.modules[name] = None  # as if not installed: importing it raises, find_spec says None
import depthroute.ops, depthroute.nn
import torch
from depthroute import RoutingConfig, nn, ops
plan = RoutingConfig(method="delta").resolve(1, width=4)
sites = nn.Sites(plan, 4)
stream = nn.ResidualStream.start(torch.ones(1, 2, 4), plan)
stream = stream.push(torch.ones(1, 2, 4))
print(stream.read(sites.at(1))[0].unique().item())
try:
    depthroute.convert
except ImportError as error:
    print(error.name.partition('.')[0])
"""
    )
    assert out.split() == ["3.0", "transformers"]


def test_importing_the_core_never_imports_triton():
    out = run_python(
        """
import torch
before = set(sys.modules)
sys.modules["transformers"] = None
import depthroute.ops, depthroute.nn
print(sorted(name for name in set(sys.modules) - before if name.split(".")[0] == "triton"))
"""
    )
    assert out.strip() == "[]"


def test_importing_the_package_asks_no_device():
    out = run_python(
        """
import torch, traceback
asked = []
def watch(name):
    original = getattr(torch.cuda, name)
    def watched(*args, **kwargs):
        asked.append((name, traceback.extract_stack()[-2].filename))
        return original(*args, **kwargs)
    setattr(torch.cuda, name, watched)
for name in ("is_available", "device_count", "_lazy_init", "init", "current_device"):
    watch(name)
import depthroute
print([a for a in asked if "depthroute" in a[1] or a[0] in ("_lazy_init", "init")])
print(torch.cuda.is_initialized())
"""
    )
    assert out.split() == ["[]", "False"]


def imported_modules(path: Path) -> set[str]:
    """Modules of the package that a file imports, inside functions too, but for type checks."""
    tree, names = ast.parse(path.read_text()), set()
    only_types = [
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    ]
    for node in ast.walk(tree):
        if node in only_types:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_no_module_imports_itself_by_way_of_others_be_it_inside_functions():
    by_name = {
        ".".join(("depthroute", *path.relative_to(PACKAGE).with_suffix("").parts)): path
        for path in SOURCES
        if path.name != "__init__.py"
    }
    graph = {name: imported_modules(path) & {*by_name} - {name} for name, path in by_name.items()}
    while leaves := [name for name, targets in graph.items() if not targets & {*graph}]:
        for name in leaves:
            del graph[name]
    assert not graph, f"these import each other in a circle: {sorted(graph)}"


def test_no_function_takes_more_than_twelve_arguments():
    """But for kernels, whose arguments are pointers."""
    crowded = [
        f"{identify(path)}: {node.name}"
        for path in SOURCES
        if "_triton" not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]) > 12
    ]
    assert crowded == []


def test_the_citation_names_the_licence_and_leaves_the_version_to_the_package():
    citation = yaml.safe_load((TESTS.parent / "CITATION.cff").read_text())
    project = tomllib.loads((TESTS.parent / "pyproject.toml").read_text())["project"]
    assert citation["license"] == project["license"]
    assert {"cff-version", "title", "message", "authors"} <= citation.keys()
    assert "version" not in citation and project["dynamic"] == ["version"]
