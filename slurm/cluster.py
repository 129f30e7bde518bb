#!/usr/bin/env python3
"""A real Slurm cluster on one Debian machine, for development and tests: `python3 slurm/cluster.py up`."""

import sys

from devcluster.cli import main

if __name__ == "__main__":
    sys.exit(main())
