"""``python -m privtune``: the command line."""

from privtune.cli import main

if __name__ == "__main__":
    main()
