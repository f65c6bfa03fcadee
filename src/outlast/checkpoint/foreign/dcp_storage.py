"""Outlast's format under torch.distributed.checkpoint, with one line changed:

    dcp.save(state, storage_writer=OutlastWriter(root, step))
    dcp.load(state, storage_reader=OutlastReader(root))

DCP plans, as it does for its own files; what was written is verified when it is read, and a save is
complete or does not exist.
"""

from outlast.checkpoint.foreign.dcp_reader import OutlastReader
from outlast.checkpoint.foreign.dcp_writer import OutlastWriter

__all__ = ["OutlastReader", "OutlastWriter"]
