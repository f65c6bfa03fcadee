"""Fixtures of a server that speaks S3, shared by the checkpoint tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.checkpoint.bucket_server import BUCKET, BucketServer


@pytest.fixture(scope="session")
def bucket_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BucketServer]:
    server = BucketServer(tmp_path_factory.mktemp("s3") / "root")
    yield server
    server.kill()


@pytest.fixture
def server(bucket_server: BucketServer, monkeypatch: pytest.MonkeyPatch) -> BucketServer:
    """Return the server to which `s3://bucket/...` leads in this test."""
    bucket_server.into(monkeypatch)
    return bucket_server


@pytest.fixture
def address(tmp_path: Path) -> str:
    """Return an address in the bucket that only this test uses."""
    return f"s3://{BUCKET}/{tmp_path.name}"
