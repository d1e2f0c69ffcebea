"""``python -m rallypoint``: the same as the command ``rallypoint``."""

from rallypoint.cli import main

if __name__ == "__main__":
    main()
