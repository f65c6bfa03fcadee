"""Detection of network directories from the kernel's list of mounts."""

from __future__ import annotations

import pytest

from outlast.checkpoint.load.load_preparation import is_networked

MOUNTS = r"""
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:40 / /home rw - nfs4 server:/home rw,vers=4.2
31 30 254:1 / /home/local rw - xfs /dev/vdb rw
32 22 0:41 / /scratch\040disk rw - lustre 10.0.0.1@tcp:/scratch rw
33 22 0:42 / /bucket rw - fuse.gcsfuse gcsfuse rw
34 22 0:43 / /merged rw - fuse.overlayfs fuse-overlayfs rw
""".strip()


@pytest.mark.parametrize(
    ("path", "networked"),
    [
        ("/", False),
        ("/homes/a", False),
        ("/home", True),
        ("/home/a/checkpoints", True),
        ("/home/local/checkpoints", False),
        ("/scratch disk/a", True),
        ("/bucket/a", True),
        ("/merged/a", False),
    ],
)
def test_directories_beyond_a_network(path: str, networked: bool) -> None:
    assert is_networked(path, MOUNTS) is networked
    assert not is_networked(path, "")
