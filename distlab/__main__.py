"""Run the command line: python -m distlab."""

import sys

from distlab.cli import main

if __name__ == "__main__":
    sys.exit(main())
