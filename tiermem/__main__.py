"""`python -m tiermem`: the same as the `tiermem` command, for when the console script is not on the path."""

from tiermem.cli.main import main

if __name__ == "__main__":
    main()
