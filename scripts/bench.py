"""Entry point of the benchmarks: `python scripts/bench.py --help` lists them."""

import sys

from bench.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
