"""Slurm's accounting, as `sacct --parsable2` or `sacct --json` prints it, read into job records."""

from outlast.fleet.formats.sacct.sacct_columns import SacctOptions
from outlast.fleet.formats.sacct.sacct_reader import read_sacct

__all__ = ["SacctOptions", "read_sacct"]
