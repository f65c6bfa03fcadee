"""Slurm's accounting, as `sacct --parsable2` or `sacct --json` prints it, read into job records."""

from outlast.fleet.sacct.options import Options
from outlast.fleet.sacct.reader import read

__all__ = ["Options", "read"]
