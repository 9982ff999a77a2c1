"""Run the command line as ``python -m privtune.cli``."""

from privtune.cli import main

main()
