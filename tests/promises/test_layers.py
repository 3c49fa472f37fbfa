"""The laws about imports hold in this repository, and each of them fires when it is broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import check_layers

ROOT = Path(__file__).resolve().parents[2]


def plant(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small house in which everything is as it should be."""
    for package in (
        "swap",
        "tiermem",
        "tiermem/memory",
        "tiermem/pager",
        "tiermem/zero3",
        "tiermem/optim",
        "tiermem/cli",
    ):
        plant(tmp_path, f"{package}/__init__.py", "")
    plant(tmp_path, "tiermem/errors.py", "")
    plant(
        tmp_path,
        "swap/engine.py",
        "import os\nimport aiofiles\nimport xxhash\nfrom swap import space\nfrom . import space",
    )
    plant(tmp_path, "swap/space.py", "if TYPE_CHECKING:\n    from typing_extensions import Buffer")
    plant(
        tmp_path, "tiermem/memory/arena.py", "import torch\nfrom swap.space import Extent\nfrom tiermem.errors import X"
    )
    plant(tmp_path, "tiermem/pager/pager.py", "from tiermem.memory import arena\nfrom ..memory.arena import Arena")
    plant(
        tmp_path,
        "tiermem/zero3/unit.py",
        "import torch.distributed\nfrom torch import nn\nfrom tiermem.pager import pager",
    )
    plant(tmp_path, "tiermem/optim/adamw.py", "from torch import nn\nfrom tiermem.pager.pager import Pager\nX = {1: 2}")
    plant(tmp_path, "tiermem/optim/none.py", "__all__ = []\nNONE: Mapping[str, int] = {}\nmade = made_of(name)")
    plant(tmp_path, "tiermem/runtime.py", "from swap import space\nfrom tiermem import zero3, optim")
    plant(tmp_path, "tiermem/cli/main.py", "import tiermem\nfrom swap.space import SwapSpace")
    return tmp_path


def test_this_repository_keeps_the_laws() -> None:
    assert [str(violation) for violation in check_layers.check(ROOT)] == []


def test_every_package_has_a_page_of_its_own() -> None:
    packages = [file.parent for name in ("swap", "tiermem") for file in (ROOT / name).rglob("__init__.py")]
    assert [str(package) for package in packages if not (package / "README.md").exists()] == []


def test_a_tree_in_order_has_no_violation(tree: Path) -> None:
    assert [str(violation) for violation in check_layers.check(tree)] == []


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tiermem/memory/bad.py", "from tiermem.pager import pager", "downwards only"),
        ("tiermem/memory/bad.py", "from ..pager.pager import Pager", "downwards only"),
        ("tiermem/memory/bad.py", "from tiermem import pager", "downwards only"),
        ("tiermem/pager/bad.py", "def f():\n    import tiermem.runtime", "downwards only"),
        ("tiermem/zero3/bad.py", "import tiermem", "downwards only"),
        ("tiermem/errors.py", "from tiermem.memory.arena import Arena", "downwards only"),
        ("tiermem/zero3/bad.py", "from tiermem.optim.adamw import AdamW", "the wings meet in pages"),
        ("tiermem/optim/bad.py", "from tiermem import zero3", "the wings meet in pages"),
        ("swap/bad.py", "import torch", "swap may not import torch"),
        ("swap/bad.py", "import numpy as np", "swap may not import numpy"),
        ("swap/bad.py", "from tiermem.errors import TiermemError", "swap may not import tiermem"),
        ("swap/bad.py", "from typing_extensions import Buffer", "swap may not import typing_extensions"),
        ("swap/bad.py", "if TYPE_CHECKING:\n    import torch", "swap may not import torch"),
        ("tiermem/memory/bad.py", "import torch.distributed as dist", "no ranks and no modules below zero3"),
        ("tiermem/pager/bad.py", "from torch import distributed", "no ranks and no modules below zero3"),
        ("tiermem/pager/bad.py", "from torch import nn", "no ranks and no modules below zero3"),
        ("tiermem/pager/bad.py", "from torch.nn import Module", "no ranks and no modules below zero3"),
        ("tiermem/memory/bad.py", "import torch\nx = torch.nn.Module", "no ranks and no modules below zero3"),
        ("tiermem/errors.py", "import torch\nx = torch.distributed", "no ranks and no modules below zero3"),
        ("tiermem/zero3/bad.py", "from swap.space import Extent", "above the pager nobody speaks bytes"),
        ("tiermem/optim/bad.py", "import swap", "above the pager nobody speaks bytes"),
        ("tiermem/__init__.py", "from swap import SwapError", "above the pager nobody speaks bytes"),
        ("tiermem/pager/utils.py", "", "utils.py is no name"),
        ("tests/utils.py", "", "utils.py is no name"),
        ("tiermem/attic.py", "", "has no floor"),
        ("tiermem/zero3/bad.py", "def f():\n    global state\n    state = 1", "state lives in objects"),
        ("tiermem/zero3/bad.py", "known: dict[str, int] = {}", "keeps known in the module: state lives in objects"),
        ("tiermem/zero3/bad.py", "import weakref\nknown = weakref.WeakSet()", "state lives in objects"),
        ("swap/bad.py", "known = []", "state lives in objects"),
        ("tiermem/pager/bad.py", "import importlib\nimportlib.import_module('tiermem.runtime')", "downwards only"),
        ("swap/bad.py", "def f():\n    import_module('torch')", "swap may not import torch"),
    ],
)
def test_a_planted_violation_is_found(tree: Path, name: str, text: str, message: str) -> None:
    plant(tree, name, text)
    found = [str(violation) for violation in check_layers.check(tree)]
    assert len(found) == 1, found
    assert found[0].startswith(f"{name}:")
    assert message in found[0]


def test_a_tree_that_is_not_there_is_not_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_layers.main([str(tmp_path / "none")]) == 2
    assert "expected the folder of a tree to check, found" in capsys.readouterr().err


def test_the_script_prints_violations_and_fails(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_layers.main([str(tree)]) == 0
    plant(tree, "swap/bad.py", "import os\nimport torch\n")
    assert check_layers.main([str(tree)]) == 1
    assert capsys.readouterr().out.startswith("swap/bad.py:2: swap may not import torch")


def test_the_hall_is_told_as_it_is() -> None:
    told = (ROOT / "tools" / "README.md").read_text(encoding="utf-8").partition("< hall (`")[2].partition("`")[0]
    hall = [name.removeprefix("tiermem.") for name, floor in check_layers.FLOORS.items() if floor == 1]
    assert sorted(told.split()) == sorted(name for name in hall if not name.startswith("memory."))
