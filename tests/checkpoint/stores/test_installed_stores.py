"""Stores of other packages: entry points, URL schemes, and errors that name them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from outlast.checkpoint import Store
from outlast.checkpoint.stores.object_store import open_store
from outlast.checkpoint.stores.store_interfaces import installed_schemes
from outlast.checkpoint.upkeep.durable_targets import DurableRule, open_targets
from outlast.errors import ConfigError, RefusedError
from outlast.testing import StoreContract

MODULE = """
from pathlib import Path

from outlast.checkpoint.stores.folder_store import Folder
from outlast.errors import RefusedError


def open_folder(address):
    return Folder(Path(address.partition("://")[2]))


def open_nothing(address):
    return object()


def fail(address):
    raise KeyError("TOKEN")


def refuse(address):
    raise RefusedError(f"{address}: no token; set SITE_TOKEN")
"""
ENTRIES = """[outlast.stores]
site = site_stores:open_folder
empty = site_stores:open_nothing
fails = site_stores:fail
refuses = site_stores:refuse
absent = site_stores:no_such_function
"""


def install(folder: Path, package: str, entries: str) -> None:
    """Write what pip leaves of a package that has entry points."""
    record = folder / f"{package}-1.0.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (record / "entry_points.txt").write_text(entries)


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path, with a package that has five entry points."""
    folder = tmp_path / "site"
    install(folder, "site-stores", ENTRIES)
    (folder / "site_stores.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "site_stores", raising=False)
    return folder


class TestInstalledStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(f"site://{tmp_path / 'checkpoints'}")


def test_its_scheme_is_listed() -> None:
    assert "site" in installed_schemes()


def test_it_is_a_durable_target(tmp_path: Path) -> None:
    address = f"site://{tmp_path / 'copies'}"
    targets, silent = open_targets([DurableRule(address=address)], tmp_path / "checkpoints")
    assert silent == []
    assert targets[0].store.where == str(tmp_path / "copies")


def test_an_unknown_scheme_names_all_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"ftp://host/runs: .*known are paths and s3, .*site"):
        open_store("ftp://host/runs")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("empty://x", r"site_stores:open_nothing of site-stores returned a object, which lacks"),
        ("fails://x", r"site_stores:fail of site-stores failed \(KeyError: 'TOKEN'\)"),
        ("absent://x", r"site_stores:no_such_function of site-stores failed \(AttributeError"),
    ],
)
def test_errors_name_the_package(address: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_store(address)


def test_errors_of_its_own_pass_through() -> None:
    with pytest.raises(RefusedError, match="SITE_TOKEN"):
        open_store("refuses://x")


def test_one_scheme_of_two_packages_is_refused(site: Path) -> None:
    install(site, "other-stores", "[outlast.stores]\nsite = site_stores:fail\n")
    with pytest.raises(ConfigError, match=r"several packages .* \(other-stores, site-stores\)"):
        open_store("site://x")


def test_outlasts_own_schemes_cannot_be_replaced(site: Path) -> None:
    install(site, "other-stores", "[outlast.stores]\nfile = site_stores:fail\n")
    assert open_store(f"file://{site}").where == str(site)


def test_entry_points_are_not_read_for_a_folder() -> None:
    code = """
import sys
from outlast.checkpoint.stores.object_store import open_store
open_store("runs")
print("importlib.metadata" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False"
