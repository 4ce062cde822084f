"""`python -m ropeway`. The guard matters: a spawned engine process imports the main module of its parent."""

import sys

from ropeway.cli import main

if __name__ == "__main__":
    sys.exit(main())
