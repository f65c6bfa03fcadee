"""Identity and address of a group's store, of torchrun's rendezvous flags."""

from __future__ import annotations

import uuid
from argparse import Namespace
from typing import NamedTuple

from outlast import config
from outlast.errors import UsageError


class StoreAddress(NamedTuple):
    """MASTER_ADDR, MASTER_PORT (None: any free one), TORCHELASTIC_RUN_ID, and whether torchrun's
    agent has the store."""

    address: str
    port: int | None
    run_id: str
    is_agents: bool = True


def read_store_address(given: Namespace, endpoint: str) -> StoreAddress:
    """Return the address that torchrun's flags give. With several nodes, `endpoint` is theirs, and
    the address of a backend other than static is chosen later. Raises UsageError for a static
    endpoint without a port.

    torchrun also takes the host's full name where no address is given; it may not resolve.
    """
    is_static = given.rdzv_backend == "static" and not given.standalone
    is_shared = config.process_environment().get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1"
    if endpoint:
        host, _, port = endpoint.rpartition(":")
        if is_static:
            return StoreAddress(host, int(port), given.rdzv_id)
        return StoreAddress(given.master_addr, None, given.rdzv_id, is_shared)
    if is_static and given.rdzv_endpoint:
        host, _, port = given.rdzv_endpoint.strip().rpartition(":")
        if not host or not port.isdecimal():
            raise UsageError(f"--rdzv-endpoint {given.rdzv_endpoint}: give HOST:PORT")
        return StoreAddress(host, int(port), given.rdzv_id)
    if given.standalone or (is_static and given.master_port is None):
        return StoreAddress(
            given.local_addr or given.master_addr, None, str(uuid.uuid4()), is_shared
        )
    if not is_static:
        address = given.local_addr or given.master_addr
        return StoreAddress(address, None, given.rdzv_id, is_shared)
    return StoreAddress(given.master_addr, given.master_port, given.rdzv_id)
