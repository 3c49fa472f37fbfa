"""Checks the laws about who may import whom, from the imports themselves.

Owns the map of the house: which package stands on which floor. Does not import what it checks, it only parses it, so
it works on any tree and needs nothing but the standard library. Guarantees that every import counts, those inside
functions, under TYPE_CHECKING and by `import_module` of a text too, and that a module without a floor is itself a
violation.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Longest prefix wins. Modules on one floor may import each other, except the two wings.
FLOORS = {
    "swap": 0,
    "tiermem.errors": 1,
    "tiermem.config": 1,
    "tiermem.settings_file": 1,
    "tiermem.figures": 1,
    "tiermem.look_ahead": 1,
    "tiermem.stats": 1,
    "tiermem.output_file": 1,
    "tiermem.timeline": 1,
    "tiermem.overlap": 1,
    "tiermem.process": 1,
    "tiermem.interrupts": 1,
    "tiermem.future": 1,
    "tiermem.errands": 1,
    "tiermem.registry": 1,
    "tiermem.wear": 1,
    "tiermem.machine_code": 1,
    "tiermem.own_swap": 1,
    # Words of the memory room without state or torch; the hall speaks them too.
    "tiermem.memory.sizes": 1,
    "tiermem.memory.links": 1,
    "tiermem.memory": 2,
    "tiermem.pager": 3,
    "tiermem.zero3": 4,
    "tiermem.optim": 4,
    "tiermem.checkpoint": 5,
    "tiermem.planner": 5,
    "tiermem.runtime": 6,
    "tiermem": 7,  # the face: re-exports what users need
    "tiermem.integrations": 8,
    "tiermem.cli": 9,
    "tiermem.__main__": 10,
}
WINGS = frozenset({"tiermem.zero3", "tiermem.optim"})
SWAP_MAY_USE = frozenset({"swap", "aiofiles", "xxhash"}) | sys.stdlib_module_names
# Importable under TYPE_CHECKING only: what is never imported at run time is no dependency.
SWAP_MAY_USE_FOR_TYPES = frozenset({"typing_extensions"})
MAY_IMPORT_SWAP = frozenset(
    {
        "swap",
        "tiermem.own_swap",
        "tiermem.config",
        "tiermem.memory",
        "tiermem.pager",
        "tiermem.checkpoint",
        "tiermem.runtime",
        "tiermem.cli",
    }
)
# State of the process, or of models that have no runtime yet: there is no object that could own it.
KEPT_IN_MODULES = frozenset({"tiermem.memory.heap._asked", "tiermem.zero3.writes._records"})
COLLECTIONS = frozenset({"dict", "list", "set", "deque", "defaultdict", "Counter", "OrderedDict"})
READ_ONLY = ("Mapping", "Sequence", "Collection", "Final")  # an empty one may be written as a dict or a list
BELOW_ZERO3 = FLOORS["tiermem.zero3"]
NOT_BELOW_ZERO3 = ("torch.distributed", "torch.nn")
SKIPPED_FOLDERS = frozenset({".git", ".venv", ".venv-oldest", "build", "dist", "__pycache__", "node_modules"})


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken law: where, and what was expected."""

    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name, resolved to the module that provides it."""

    target: str
    line: int
    for_types: bool = False  # under `if TYPE_CHECKING:`


def check(root: Path) -> list[Violation]:
    """Return every violation of the import laws in the tree `root`, in order of file and line."""
    modules = {module_name(root, path): path for path in product_files(root)}
    violations = list(check_forbidden_names(root))
    for name, path in modules.items():
        relative = path.relative_to(root)
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        home = room(name)
        if home is None:
            violations.append(Violation(relative, 1, f"{name} has no floor; give it one in tools/check_layers.py"))
            continue
        for found in imports(tree, name, path.name == "__init__.py", frozenset(modules)):
            message = judge(home, name, found)
            if message is not None:
                violations.append(Violation(relative, found.line, message))
        for line, message in (*check_names_used(home, name, tree), *check_kept(name, tree)):
            violations.append(Violation(relative, line, message))
    return sorted(set(violations), key=lambda violation: (str(violation.path), violation.line, violation.message))


def judge(home: str, name: str, found: Import) -> str | None:
    """Say what is wrong with module `name`, of room `home`, having the import `found`; None if it may."""
    target = found.target
    if home == "swap":
        if target.partition(".")[0] in SWAP_MAY_USE | (SWAP_MAY_USE_FOR_TYPES if found.for_types else frozenset()):
            return None
        return f"swap may not import {target}: standard library, aiofiles, xxhash only"
    if is_within(target, "swap"):
        return (
            None if home in MAY_IMPORT_SWAP else f"{name} may not import {target}: above the pager nobody speaks bytes"
        )
    if FLOORS[home] < BELOW_ZERO3 and any(is_within(target, forbidden) for forbidden in NOT_BELOW_ZERO3):
        return f"{name} may not import {target}: no ranks and no modules below zero3"
    if not is_within(target, "tiermem"):
        return None
    away = room(target)
    if away is None:
        return f"{name} imports {target}, which has no floor"
    if home != away and {home, away} <= WINGS:
        return f"{name} may not import {target}: the wings meet in pages"
    if FLOORS[away] > FLOORS[home]:
        return f"{name} (floor {FLOORS[home]}) may not import {target} (floor {FLOORS[away]}): downwards only"
    return None


def room(module: str) -> str | None:
    """Return the entry of FLOORS that `module` belongs to, or None if it has none."""
    if module in FLOORS:
        return module
    parent = module.rpartition(".")[0]
    # A module directly under `tiermem` needs an entry of its own: the face is not a floor to fall back to.
    return None if parent in {"", "tiermem"} else room(parent)


def is_within(module: str, package: str) -> bool:
    """Return whether `module` is `package` or inside it."""
    return module == package or module.startswith(package + ".")


def product_files(root: Path) -> Iterator[Path]:
    """Yield the Python files of both packages."""
    for package in ("swap", "tiermem"):
        yield from sorted((root / package).rglob("*.py"))


def module_name(root: Path, path: Path) -> str:
    """Return the dotted name of the module in `path`."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.Module, name: str, is_package: bool, modules: frozenset[str]) -> Iterator[Import]:
    """Yield all imports of a module, `from package import module` resolved to the module where it is one."""
    guarded = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for child in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, id(node) in guarded)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node, name, is_package)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                known = full in modules or full in NOT_BELOW_ZERO3
                yield Import(full if known else base, node.lineno, id(node) in guarded)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "import_module":
            yield from (
                Import(str(each.value), node.lineno) for each in node.args[:1] if isinstance(each, ast.Constant)
            )


def absolute(node: ast.ImportFrom, name: str, is_package: bool) -> str:
    """Return the absolute module that a `from ... import` names."""
    if node.level == 0:
        return node.module or ""
    parts = name.split(".")
    kept = parts[: len(parts) - node.level + (1 if is_package else 0)]
    return ".".join([*kept, node.module] if node.module else kept)


def check_names_used(home: str, name: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield uses of `torch.nn` and `torch.distributed` as attributes below zero3, and `global` statements anywhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield node.lineno, f"{name} uses global {', '.join(node.names)}: state lives in objects"
        if FLOORS[home] >= BELOW_ZERO3 or not isinstance(node, ast.Attribute):
            continue
        if isinstance(node.value, ast.Name) and f"{node.value.id}.{node.attr}" in NOT_BELOW_ZERO3:
            yield node.lineno, f"{name} may not use torch.{node.attr}: no ranks and no modules below zero3"


def check_kept(name: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield collections that a module begins empty: they are there to be filled, which makes them globals."""
    for node in tree.body:
        if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None or not _is_empty(node.value):
            continue
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).startswith(READ_ONLY):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in map(ast.unparse, targets):
            if target != "__all__" and f"{name}.{target}" not in KEPT_IN_MODULES:
                yield node.lineno, f"{name} keeps {target} in the module: state lives in objects"


def _is_empty(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        called = ast.unparse(value.func).rpartition(".")[2]
        return called in COLLECTIONS or called.startswith("Weak")
    return (isinstance(value, ast.Dict) and not value.keys) or (isinstance(value, ast.List) and not value.elts)


def check_forbidden_names(root: Path) -> Iterator[Violation]:
    """Yield files called utils.py anywhere in the tree: a module is named after the thing it holds."""
    for path in sorted(root.rglob("utils.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(relative.parts):
            yield Violation(relative, 1, "utils.py is no name: call the module after what it holds")


def main(arguments: list[str]) -> int:
    """Check the tree given as the only argument (default: this repository); print violations, return the exit code."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    if not root.is_dir():  # nothing is found in it, which would look like a tree in order
        print(f"expected the folder of a tree to check, found {str(root)!r}", file=sys.stderr)
        return 2
    violations = check(root)
    for violation in violations:
        print(violation)
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
