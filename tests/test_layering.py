"""Imports point down only; files stay small; importing is cheap and needs no GPU package."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys
import tomllib

import fmoe

ROOT = pathlib.Path(fmoe.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

#: Who may import whom, lowest first: a part imports parts above it in this list, and itself.
LAYERS = [
    "_autocast",
    "_errors",
    "_recent",
    "_typing",
    "_axes",
    "_value",
    "values",
    "program",
    "cost",
    "ops",
    "_trace_rules",
    "trace",
    "sharding",
    "functional",
    "text",
    "signature",
    "stages",
    "auto",
    "module",
    "integrations",
    "measure",
    "calibrate",
    "workload",
    "advice",
    "grid",
    "sweep_report",
    "sweep",
    "transforms",
    "__init__",
    "__main__",
]


def part_of(path: pathlib.Path) -> str:
    relative = path.relative_to(ROOT).parts
    return relative[0].removesuffix(".py")


def imports_of(path: pathlib.Path) -> set[tuple[str, ...]]:
    """Module paths inside fmoe that the file imports, relative to fmoe."""
    package = path.relative_to(ROOT).parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            module = (*base, *(node.module or "").split(".")) if node.module else base
            found.update([module] if node.module else [(*module, alias.name) for alias in node.names])
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fmoe":
            found.add(tuple(node.module.split(".")[1:]))
        elif isinstance(node, ast.Import):
            found.update(tuple(a.name.split(".")[1:]) for a in node.names if a.name.split(".")[0] == "fmoe")
    return found


def test_imports_point_down():
    wrong = []
    for path in FILES:
        mine = part_of(path)
        assert mine in LAYERS, path
        for module in imports_of(path):
            other = module[0] if module else "__init__"
            if other == "__version__":
                other = "__init__"
            if LAYERS.index(other) > LAYERS.index(mine):
                wrong.append(f"{path.relative_to(ROOT)} imports {'.'.join(module)}")
    assert wrong == []


def test_where_and_what_are_apart():
    """What is computed knows of where it runs only the spec; only one file of `sharding` knows of processes."""
    for path in (ROOT / "functional").glob("*.py"):
        assert {m for m in imports_of(path) if m and m[0] == "sharding"} <= {("sharding", "spec")}, path
    users = {path.name for path in (ROOT / "sharding").glob("*.py") if "torch.distributed" in _all_imports(path)}
    assert users == {"distribute.py"}


def test_modules_have_no_cycle():
    graph = {}
    for path in FILES:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        graph[name.removesuffix(".__init__")] = {".".join(m) for m in imports_of(path)}

    def visit(name, trail):
        assert name not in trail, " -> ".join([*trail, name])
        for other in graph.get(name, ()):
            if other != name:
                visit(other, [*trail, name])

    for name in graph:
        if name != "__init__":
            visit(name, [])


def test_every_package_is_installed():
    listed = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {".".join(path.parent.relative_to(ROOT.parent).parts) for path in ROOT.rglob("__init__.py")}
    assert set(listed) == found


def test_only_one_file_defines_operators():
    users = {
        str(path.relative_to(ROOT))
        for path in FILES
        if any(word in path.read_text() for word in ("autograd.Function", "torch.library", "torch._C.", "_functorch"))
    }
    assert users == {"ops/differentiable.py"}


def test_triton_stays_in_kernels():
    for path in FILES:
        if "kernels" not in path.parts:
            assert "triton" not in {n.split(".")[0] for n in _all_imports(path)}, path


def _all_imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""


def test_files_and_functions_stay_small():
    for path in FILES:
        text = path.read_text()
        assert len(text.splitlines()) <= 400, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
                assert lines <= 60, f"{path.name}: {node.name} has {lines} lines"


def test_import_pulls_in_no_extra_package():
    """What `import fmoe` loads beyond torch, numpy and optree; heavy packages come on first use."""
    code = (
        "import torch, sys; before = set(sys.modules); import fmoe; "
        "new = {name.split('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(new & {'triton', 'rich', 'matplotlib', 'sympy', 'scipy', 'pandas', 'torchvision'})); "
        "print([n for n in sys.modules if n.startswith('torch._dynamo') and n not in before])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["[]", "[]"]


def test_optree_is_optional():
    """Trees of the library are torch's own: a machine without optree runs a layer, and user's experts."""
    code = (
        "import sys; sys.modules['optree'] = None; import fmoe, torch; "
        "config = fmoe.MoEConfig(2, 3, 5, capacity=1.0); params = fmoe.init(config, seed=0); "
        "print(tuple(fmoe.moe(params.to(torch.float64), torch.ones(4, 3).double(), config)[0].shape)); "
        "own = fmoe.MoEParams(params.router, {'b': torch.ones(2), 'a': torch.full((2,), 2.0)}); "
        "double = config.replace(fn=lambda p, rows: p['a'] * p['b'] * rows, capacity=None); "
        "print(fmoe.moe(own, torch.ones(1, 3), double)[0].mean() > 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["(4, 3)", "tensor(True)"]
