"""Arrows run one way: kernels <- kv <- engine <- session <- cli; documents, prompt, quotes and errors are leaves."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "transformers", "kvchat_kernels")
LEAVES = (
    "kvchat.documents",
    "kvchat.prompt",
    "kvchat.quotes",
    "kvchat.passages",
    "kvchat.errors",
    "kvchat.places",
)

ALLOWED = {  # what a module may import of kvchat and the kernels
    "kvchat.errors": (),
    "kvchat.places": ("kvchat.errors",),
    "kvchat.documents": ("kvchat.errors", "kvchat.documents"),
    "kvchat.prompt": ("kvchat.errors",),
    "kvchat.quotes": ("kvchat.errors", "kvchat.documents", "kvchat.quotes"),
    "kvchat.passages": ("kvchat.documents", "kvchat.quotes"),
    "kvchat.kv": ("kvchat.errors", "kvchat.kv", "kvchat_kernels"),
    "kvchat.memory": ("kvchat.kv.format", "kvchat.kv.shape"),
    "kvchat.engine": ("kvchat.errors", "kvchat.kv"),
    "kvchat.store": ("kvchat.documents", "kvchat.kv", "kvchat.memory", "kvchat.store"),
    "kvchat_kernels": ("kvchat_kernels",),
}
FORBIDDEN = {
    "kvchat.session": ("kvchat.cli", "kvchat.ui", "kvchat.chat", "kvchat_kernels"),
    "kvchat.models": ("kvchat.cli", "kvchat.ui", "kvchat.session", "kvchat.engine", "kvchat_kernels"),
    "kvchat.ui": (
        *HEAVY,
        "kvchat.engine",
        "kvchat.session",
        "kvchat.models.load",
        "kvchat.kv.cache",
        "kvchat.cli",
    ),
    "kvchat.cli": ("kvchat_kernels",),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] == "kernels":
        parts = ("kvchat_kernels", *parts[1:])
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_name(p): p for folder in ("kvchat", "kernels") for p in sorted((ROOT / folder).rglob("*.py"))
}


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def imports(tree: ast.AST, functions: bool = True) -> Iterator[str]:
    """Absolute names that are imported, those for the type checker alone left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute here"
            assert node.module
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        elif functions or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from imports(node, functions)


def imported(module: str, functions: bool = True) -> set[str]:
    return set(imports(ast.parse(MODULES[module].read_text("utf-8")), functions))


def loaded_by(module: str) -> set[str]:
    """Everything that importing a module imports, through kvchat's own modules and their packages."""
    seen: set[str] = set()
    todo = {module}
    while todo:
        name = todo.pop()
        seen.add(name)
        if name in MODULES:
            todo |= imported(name, functions=False)
            parts = name.split(".")
            todo |= {".".join(parts[:i]) for i in range(1, len(parts))}
        todo -= seen
    return seen


@pytest.mark.parametrize("module", MODULES)
def test_arrows_run_one_way(module: str) -> None:
    ours = {name for name in imported(module) if within(name, ("kvchat", "kvchat_kernels"))}
    for owner, allowed in ALLOWED.items():
        if within(module, (owner,)):
            assert {name for name in ours if not within(name, allowed)} == set()
    for owner, forbidden in FORBIDDEN.items():
        if within(module, (owner,)):
            assert {name for name in imported(module) if within(name, forbidden)} == set()
    if not within(module, ("kvchat.kv", "kvchat_kernels")):
        assert not within("kvchat_kernels", tuple(ours)), "kernels are chosen in kvchat.kv.ops alone"


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("kvchat_kernels")])
def test_kernels_import_torch_and_themselves_only(module: str) -> None:
    foreign = {
        n
        for n in imported(module)
        if not within(n, ("torch", "kvchat_kernels", "triton", "numba", "llvmlite", "numpy"))
    }
    assert {n for n in foreign if n.split(".")[0] not in sys.stdlib_module_names} == set()


@pytest.mark.parametrize(
    "module", [m for m in MODULES if within(m, (*LEAVES, "kvchat.ui", "kvchat.memory", "kvchat.kv.format"))]
)
def test_light_modules_load_nothing_heavy(module: str) -> None:
    assert {name for name in loaded_by(module) if within(name, HEAVY)} == set()


def test_the_walk_sees_what_is_there() -> None:
    """Negative control of the rules above."""
    assert "kvchat_kernels.torch_attend" in imported("kvchat.kv.ops")
    assert within("torch", tuple(imported("kvchat.engine")))
    assert "torch" in loaded_by("kvchat.session")
    assert {
        "kvchat.session",
        "kvchat.prompt",
        "kvchat.kv.cache",
        "kvchat_kernels.reference",
    } <= MODULES.keys()


def test_kernels_is_no_package_of_its_own() -> None:
    """With an __init__.py it would shadow Hugging Face's package `kernels`, which transformers imports."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize(
    "module",
    [m for m in ("kvchat", "kvchat.cli", "kvchat.ui", "kvchat.documents", "kvchat.prompt") if m in MODULES],
)
def test_importing_the_program_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; print(*({{'torch', 'transformers', 'pypdf'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == []
