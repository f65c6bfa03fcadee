"""Checkpoint stores of other packages: entry points of the group `outlast.stores`.

A package names one entry point for each URL scheme::

    [project.entry-points."outlast.stores"]
    sqlite = "outlast_sqlite:open_store"

The object is a function that takes the whole address (`sqlite:///data/runs.db`) and returns a
`Store`. It may raise any OutlastError. `outlast.testing.StoreContract` tests a store.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib.metadata import EntryPoint, entry_points

from outlast.checkpoint.stores.store_interfaces import Store
from outlast.errors import ConfigError, OutlastError

GROUP = "outlast.stores"
_METHODS = (
    "create", "directories", "files", "get", "point", "put", "read", "remove", "where",
)  # fmt: skip


def installed_schemes() -> list[str]:
    """Return the URL schemes of installed stores, sorted and without duplicates."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def open_installed_store(address: str, built_in: Collection[str]) -> Store:
    """Open the store of another package.

    Args:
        address: a URL whose scheme is not one of `built_in`.
        built_in: the schemes of Outlast's own stores, for the message.

    Raises:
        ConfigError: no package or several packages have this scheme, the entry point cannot be
            loaded, or it does not return a store.
        OutlastError: whatever the package's own function raises.
    """
    scheme = address.partition("://")[0]
    entries = [entry for entry in entry_points(group=GROUP) if entry.name == scheme]
    if not entries:
        known = ", ".join([*built_in, *installed_schemes()])
        raise ConfigError(f"{address}: cannot store there; known are paths and {known}")
    if len(entries) > 1:
        owners = ", ".join(sorted(_owner(entry) for entry in entries))
        raise ConfigError(
            f"{address}: several packages provide {scheme}:// ({owners}); nothing was opened;"
            " uninstall all but one"
        )
    store = _open(entries[0], address)
    missing = [name for name in _METHODS if not hasattr(store, name)]
    if missing:
        raise ConfigError(
            f"{address}: {entries[0].value} of {_owner(entries[0])} returned a"
            f" {type(store).__name__}, which lacks {', '.join(missing)}; nothing was opened;"
            " correct the package (outlast.testing.StoreContract tests a store)"
        )
    return store


def _open(entry: EntryPoint, address: str) -> Store:
    try:
        return entry.load()(address)
    except OutlastError:
        raise
    except Exception as error:  # any error of a foreign package becomes one with its name
        raise ConfigError(
            f"{address}: {entry.value} of {_owner(entry)} failed ({type(error).__name__}: {error});"
            " nothing was opened; correct the address or the package"
        ) from error


def _owner(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else "an unnamed package"
