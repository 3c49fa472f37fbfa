"""Other people's trainers are optional: importing tiermem imports none of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import tiermem

ROOT = Path(tiermem.__file__).parent
OPTIONAL = {"transformers", "accelerate", "deepspeed", "peft"}


def imported_at_once(body: list[ast.stmt]) -> Iterator[str]:
    """What importing a module imports: everything that is not inside a function."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (name.name.split(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for block in ("body", "orelse", "handlers", "finalbody"):
                yield from imported_at_once(getattr(node, block, []))


def test_what_is_optional_is_imported_by_those_who_use_it_only() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): optional
        for path in ROOT.rglob("*.py")
        if (optional := OPTIONAL & set(imported_at_once(ast.parse(path.read_text("utf-8")).body)))
    }
    assert found == {
        "integrations/trainer.py": {"transformers", "accelerate"},
        "integrations/adapter_files.py": {"peft"},
        "integrations/adapters.py": {"transformers"},
        "integrations/unwrapped.py": {"transformers"},
    }
