"""Checkpoints in an object store: S3, Google Cloud Storage, Azure and compatible ones.

The library obstore does the requests, with credentials and endpoints from the environment as each
service's own tools read them. The extra `objects` installs it; it is imported when a bucket is
opened.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.checkpoint.format.manifests import COMMIT, LATEST
from outlast.checkpoint.stores.folder_store import Folder
from outlast.checkpoint.stores.store_interfaces import (
    GET_BYTES_MAX,
    Store,
    check_name,
    open_installed_store,
)
from outlast.errors import ConfigError, CorruptionError, RefusedError, StorageError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

_PART_BYTES = 16 << 20
_COPY_BYTES_MAX = 5 * 10**9
_PARTS_MAX = 9000  # S3 takes 10,000 parts an object, Azure more
_PARTS_AT_ONCE = 2
_STALL_S = 30.0
_METADATA = re.compile(r"169\.254\.169\.254|/latest/api/token|computeMetadata|metadata/identity")
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_REGION)",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_LOCAL = "file://"
_MISTYPED_URL = re.compile(r"(s3|gs|az|file)(//|:)")


def refuse_mistyped_url(text: str) -> None:
    """Raise ConfigError for a text such as `s3:/bucket`, which would be a directory."""
    if "://" not in text and _MISTYPED_URL.match(text):
        raise ConfigError(f"{text} is no URL: write SCHEME://..., or ./{text} for a directory")


def open_store(
    address: str | Path,
    *,
    request_s: float = 120.0,
    retries: int = 8,
    retry_s: float = 120.0,
    ask: bool = True,
) -> Store:
    """Return the store at a path, `file:///path`, `s3://bucket/prefix`, `gs://...` or `az://...`,
    or at a URL whose scheme another package provides (`open_installed_store`).

    With `ask`, a bucket is listed once: one that is missing or without credentials is a
    RefusedError here, and one out of reach a StorageError. `request_s`: deadline of one request;
    `retries` and `retry_s`: number and duration of retries. Raises ConfigError for an address of an
    unknown kind, and where the extra is missing.
    """
    text = str(address)
    if text.startswith(_LOCAL):
        text = text.removeprefix(_LOCAL)
        if not text.startswith("/"):
            raise ConfigError(f"{address}: a file URL has three slashes, as in file:///path")
    scheme, is_url, _ = text.partition("://")
    refuse_mistyped_url(text)
    if isinstance(address, Path) or not is_url:
        return Folder(Path(text))
    if scheme in _CREDENTIALS:
        store = Bucket(_connected(text, request_s, retries, retry_s), text.rstrip("/"))
    else:
        store = open_installed_store(text, _CREDENTIALS)
    if ask:
        store.directories()
    return store


def _connected(url: str, request_s: float, retries: int, retry_s: float) -> ObjectStore:
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{url} needs {error.name}, which is not installed; add it with:"
            " pip install 'outlast[objects]'"
        ) from error
    client: ClientConfig = {
        "allow_http": True,  # of effect only where an endpoint was given as http://
        "connect_timeout": timedelta(seconds=min(_STALL_S, request_s)),
        "read_timeout": timedelta(seconds=min(_STALL_S, request_s)),
        "timeout": timedelta(seconds=request_s),
    }
    retry: RetryConfig = {
        "max_retries": retries,
        "retry_timeout": timedelta(seconds=retry_s),
        "backoff": {
            "init_backoff": timedelta(milliseconds=100),
            "max_backoff": timedelta(seconds=10),
            "base": 2,
        },
    }
    try:
        if url.startswith("s3://"):
            # Many services that speak like S3 refuse to delete several objects at once, or even one
            # by that request (501 Not Implemented): one request an object is known to all of them.
            return from_url(  # pyright: ignore[reportCallIssue] - the key is not in its types
                url, client_options=client, retry_config=retry, aws_disable_bulk_delete=True
            )
        return from_url(url, client_options=client, retry_config=retry)
    except (BaseError, ValueError) as error:
        scheme = url.partition("://")[0]
        raise ConfigError(
            f"{url}: cannot be opened: {_line(error)}; nothing was touched; set"
            f" {_CREDENTIALS[scheme]}"
        ) from error


class Bucket:
    """The Store of a prefix in a bucket. Objects appear complete or not at all."""

    def __init__(self, store: ObjectStore, where: str) -> None:
        self._store = store
        self._where = where

    @property
    def where(self) -> str:
        """Return the URL of the prefix."""
        return self._where

    def directories(self) -> list[str]:
        """See StoreSource.directories; one request."""
        import obstore

        with self._mapped("could not be listed"):
            prefixes = obstore.list_with_delimiter(self._store)["common_prefixes"]
        return [prefix.rsplit("/", 1)[-1] for prefix in prefixes]

    def files(self, directory: str) -> dict[str, int]:
        """See StoreSource.files; one request."""
        import obstore

        with self._mapped("could not be listed", check_name(directory)):
            listed = obstore.list_with_delimiter(self._store, directory)
        sizes = {entry["path"].rsplit("/", 1)[-1]: entry["size"] for entry in listed["objects"]}
        return sizes | {prefix.rsplit("/", 1)[-1]: -1 for prefix in listed["common_prefixes"]}

    def holding(self, name: str) -> set[str]:
        """See ListedSource.holding."""
        import obstore

        end = f"/{check_name(name)}"
        directories: set[str] = set()
        with self._mapped("could not be listed"):
            for batch in obstore.list(self._store):
                paths = (entry["path"] for entry in batch)
                directories |= {path.removesuffix(end) for path in paths if path.endswith(end)}
        return {directory for directory in directories if "/" not in directory}

    def get(self, directory: str, name: str) -> bytes:
        """See StoreSource.get."""
        import obstore

        path = _path(directory, name)
        with self._mapped("could not be read", path):
            response = obstore.get(self._store, path)
            if (size := response.meta["size"]) > GET_BYTES_MAX:
                raise CorruptionError(
                    f"{self.where}/{path}: {size} bytes are more than a record can have"
                )
            return bytes(response.bytes())

    def read(self, directory: str, name: str, at: int, into: memoryview) -> None:
        """See StoreSource.read; in requests of 16 MiB."""
        path = _path(directory, name)
        for start in range(0, len(into), _PART_BYTES):
            part = into[start : start + _PART_BYTES]
            data = self._range(path, at + start, len(part))
            if len(data) != len(part):
                raise CorruptionError(
                    f"{self.where}/{path}: ends at byte {at + start + len(data)}, where bytes {at}"
                    f" to {at + len(into)} were wanted"
                )
            part[:] = data

    def put(
        self, directory: str, name: str, parts: Iterable[bytes | memoryview], size_bytes: int
    ) -> None:
        """See Store.put; holds at most 4 parts of 16 MiB, or of a 9000th of the file, in memory."""
        import obstore

        path = _path(directory, name)
        chunks = _counted(parts, size_bytes, f"{self.where}/{path}")
        part_bytes = max(_PART_BYTES, -(-size_bytes // _PARTS_MAX))
        with self._mapped("could not be written", path):
            if size_bytes <= _PART_BYTES:
                obstore.put(self._store, path, b"".join(chunks), use_multipart=False)
            else:
                obstore.put(
                    self._store,
                    path,
                    chunks,
                    use_multipart=True,
                    chunk_size=part_bytes,
                    max_concurrency=_PARTS_AT_ONCE,
                )
            stored_bytes = obstore.head(self._store, path)["size"]
        if stored_bytes != size_bytes:
            raise StorageError(
                f"{self.where}/{path}: {size_bytes} bytes were sent, {stored_bytes} stored"
            )

    def duplicate(self, directory: str, name: str, other: str) -> bool:
        """See DuplicatingStore.duplicate. Services copy up to 5 GB in one request."""
        import obstore

        source, path = _path(other, name), _path(directory, name)
        try:
            with self._mapped("could not be copied", source):
                size_bytes = obstore.head(self._store, source)["size"]
                if size_bytes > _COPY_BYTES_MAX:
                    return False
                obstore.copy(self._store, source, path)
                return obstore.head(self._store, path)["size"] == size_bytes
        except (CorruptionError, StorageError):
            return False  # sending it reports the error

    def create(self, directory: str, name: str, data: bytes) -> bool:
        """See Store.create. False is also possible for this very call, if an answer was lost."""
        import obstore
        from obstore.exceptions import AlreadyExistsError

        path = _path(directory, name)
        with self._mapped("could not be written", path):
            try:
                obstore.put(self._store, path, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
        return True

    def point(self, directory: str) -> None:
        """See Store.point."""
        import obstore

        with self._mapped("could not be written", LATEST):
            obstore.put(self._store, LATEST, f"{check_name(directory)}\n".encode())

    def remove(self, directory: str) -> None:
        """See Store.remove."""
        import obstore

        with self._mapped("could not be removed", check_name(directory)):
            with suppress(FileNotFoundError):
                obstore.delete(self._store, f"{directory}/{COMMIT}")
            for batch in obstore.list(self._store, directory):
                paths = [entry["path"] for entry in batch]
                try:
                    obstore.delete(self._store, paths)
                except FileNotFoundError:  # removed concurrently
                    for path in paths:
                        with suppress(FileNotFoundError):
                            obstore.delete(self._store, path)

    def _range(self, path: str, at: int, size_bytes: int) -> memoryview:
        """Return bytes from `at` on, fewer where the object ends before."""
        import obstore
        from obstore.exceptions import BaseError

        with self._mapped("could not be read", path):
            try:
                return memoryview(obstore.get_range(self._store, path, start=at, length=size_bytes))
            except BaseError:
                # Services differ in their error for an object that ends before `at`.
                if obstore.head(self._store, path)["size"] <= at:
                    return memoryview(b"")
                raise

    @contextmanager
    def _mapped(self, what: str, path: str = "") -> Iterator[None]:
        """Translate obstore's errors into Outlast's, with place, effect and remedy."""
        from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

        where = f"{self.where}/{path}" if path else self.where
        try:
            yield
        except (BaseError, OSError) as error:
            scheme = self.where.partition("://")[0]
            message, credentials = str(error), _CREDENTIALS.get(scheme, "its credentials")
            if isinstance(error, PermissionDeniedError | UnauthenticatedError):
                raise RefusedError(
                    f"{where}: {what}: access is denied; nothing was changed; check the permissions"
                    f" of {credentials}"
                ) from error
            if _METADATA.search(message):
                raise RefusedError(
                    f"{where}: {what}: there are no credentials; nothing was changed; set"
                    f" {credentials}"
                ) from error
            if "NoSuchBucket" in message or "ContainerNotFound" in message:
                raise RefusedError(
                    f"{where}: {what}: there is no such bucket; nothing was changed; make it, or"
                    " name another"
                ) from error
            if isinstance(error, FileNotFoundError):
                raise CorruptionError(f"{where}: is missing; nothing was read from it") from error
            if "Connect" in message or "error sending request" in message:
                raise StorageError(
                    f"{where}: {what}: its endpoint cannot be reached ({_line(error)}); nothing was"
                    " changed; check the network and the endpoint's address"
                ) from error
            raise StorageError(f"{where}: {what}: {_line(error)}") from error


def _path(directory: str, name: str) -> str:
    return f"{check_name(directory)}/{check_name(name)}"


def _counted(parts: Iterable[bytes | memoryview], size_bytes: int, where: str) -> Iterator[bytes]:
    """Yield copies of the parts: they are sent while the next one is produced in their place.

    Raises StorageError where their total is not `size_bytes`, which undoes the upload.
    """
    done = 0
    for part in parts:
        done += len(part)
        if done > size_bytes:
            break
        yield bytes(part)
    if done != size_bytes:
        raise StorageError(f"{where}: {done} of {size_bytes} bytes were given; not written")


def _line(error: Exception) -> str:
    """Return the first line of a service's error message, shortened."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
