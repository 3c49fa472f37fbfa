"""Whether `swap` is the package that came with this one, asked before anything else is imported.

Owns the error that says so. Does not know what is in it. Guarantees that a directory or a script of that name, which is
what people call a place for swap files, is named where it hides the package.
"""

import swap

if not hasattr(swap, "SwapSpace"):
    _found = [swap.__file__] if getattr(swap, "__file__", None) else list(swap.__path__)
    raise ImportError(
        f"tiermem needs its own package swap, which is hidden by {', '.join(map(str, _found))}: give that another "
        "name, or start Python in another directory"
    )
