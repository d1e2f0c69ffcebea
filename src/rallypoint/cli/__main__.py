"""``python -m rallypoint.cli``."""

from rallypoint.cli import main

if __name__ == "__main__":
    main()
