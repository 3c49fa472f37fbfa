"""A table of settings as a `.toml` or `.json` file.

Owns the two forms of the file. Does not know the settings. Guarantees that what was written is read back equal, and
that a file which cannot be read is named in a ConfigError.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tiermem.errors import ConfigError
from tiermem.output_file import write_whole


def settings_path(path: object) -> Path:
    """The file that a caller means by `path`. Raises ConfigError for what is no path."""
    given = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(given, str):
        raise ConfigError(f"expected the path of a settings file (.toml or .json), found {type(path).__name__}")
    return Path(os.path.expanduser(given))


def read_settings(file: Path) -> dict[str, Any]:
    """The table in a `.toml` or `.json` file, whatever is in it. Raises ConfigError."""
    form = form_of(file)
    try:
        text = file.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark that says UTF-8
        settings = tomllib.loads(text) if form == "toml" else json.loads(text, object_pairs_hook=once)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read settings from {file}: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"expected a table of settings in {file}, found {type(settings).__name__}")
    return settings


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, from its pairs. Raises ValueError if a key is there twice: the first would be dropped."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a key twice among {[key for key, _ in pairs]}")
    return found


def write_settings(file: Path, settings: Mapping[str, str | int | float | bool | list[str]]) -> None:
    """Write the table to a `.toml` or `.json` file. Raises ConfigError for another ending, and OSError."""
    if form_of(file) == "json":
        write_whole(file, json.dumps(settings, indent=2) + "\n")
        return
    # JSON's numbers, booleans, lists and text are TOML's too, but for surrogate escapes and an unescaped DEL.
    lines = (f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in settings.items())
    write_whole(file, "".join(lines).replace("\x7f", "\\u007f"))


def form_of(file: Path) -> Literal["toml", "json"]:
    """Which of the two forms the file's name says. Raises ConfigError for another ending."""
    suffix = file.suffix.lower()
    if suffix in (".toml", ".json"):
        return "toml" if suffix == ".toml" else "json"
    raise ConfigError(f"expected a settings file ending in .toml or .json, found {file}")
