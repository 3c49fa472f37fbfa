"""`python -m tiermem`: the same as the `tiermem` command, for when the console script is not on the path.

Python imports the package before this module: an interrupt that comes meanwhile is shown as Python shows it.
"""

from tiermem_command import main

if __name__ == "__main__":
    main()
