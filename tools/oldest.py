"""The oldest version of each library that pyproject.toml allows, as constraints for pip: what `make oldest` installs.

Owns the reading of lower bounds. Does not install anything. Guarantees a line for every library that is needed to run
the tests, and an error for one without a lower bound; torch, of which there are several builds, is left to the caller.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

_BOUND = re.compile(r"(?P<name>[\w.-]+)>=(?P<version>[\w.]+)(,<[\w.]+)?")
_EXTRAS = ("hf", "plots", "test")
_LEFT_OUT = ("torch",)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the constraints of the pyproject.toml that is named; 1 if a bound is missing."""
    named = sys.argv[1:] if arguments is None else arguments
    path = Path(named[0]) if named else Path(__file__).parents[1] / "pyproject.toml"
    try:
        lines = oldest(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


def oldest(text: str) -> list[str]:
    """The lines `name==version` for a pyproject.toml. Raises ValueError for a requirement that has no lower bound."""
    project = tomllib.loads(text)["project"]
    needed = [*project["dependencies"]]
    for extra in _EXTRAS:
        needed += project["optional-dependencies"][extra]
    bounds: dict[str, str] = {}
    for requirement in needed:
        match = _BOUND.fullmatch(requirement)
        if match is None:
            raise ValueError(f"expected a requirement like name>=1.2, found {requirement!r}")
        if bounds.setdefault(match["name"], match["version"]) != match["version"]:
            raise ValueError(f"{match['name']} has two lower bounds, {bounds[match['name']]} and {match['version']}")
    return [f"{name}=={version}" for name, version in sorted(bounds.items()) if name not in _LEFT_OUT]


if __name__ == "__main__":
    sys.exit(main())
