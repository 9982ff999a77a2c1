"""``python -m privtune``: the command line."""

import os
import sys

# With -m, Python looks for modules in the working folder first. These two are loaded whenever Python starts;
# what is imported below comes from where packages are installed.
try:
    if sys.path[0] == os.getcwd():
        del sys.path[0]
except FileNotFoundError:  # the folder was deleted, and is no place on the path
    pass

from privtune.cli import main

if __name__ == "__main__":
    main()
