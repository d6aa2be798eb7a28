"""Objects below a URL: reads and writes that are repeated after errors of the network or the store."""

from __future__ import annotations

import logging
import math
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from runnerkit.storage.atomic_file import AtomicFile
from runnerkit.storage.checksum import sha256_of
from runnerkit.support.redaction import redacted

T = TypeVar("T")
logger = logging.getLogger(__name__)

PATIENCE_S = 300.0  # how long an operation is repeated after its first failure
FIRST_PATIENCE_S = 90.0  # until one has succeeded: the URL or the endpoint may be wrong
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 15.0
_REPORT_EVERY_S = 30.0
_NUM_READS = 3  # of an object whose checksum is wrong
# Errors that a repetition does not change. Names of botocore's and others', which may not be installed.
_LASTING = (
    FileNotFoundError
    | FileExistsError
    | PermissionError
    | IsADirectoryError
    | ImportError
    | TypeError
    | ValueError
    | NotImplementedError
)
_LASTING_NAMES = {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound"}
_CONDITION = {"PreconditionFailed", "412"}


class Replaced(Exception):
    """Error of a conditional write: the object is not the one that was read before."""


class Damaged(ValueError):
    """Error of an object whose checksum is wrong."""


class Store:
    """The objects below one URL.

    Args:
        url: as :func:`as_url` returns it.
        patience_s: how long an operation is repeated while the store fails; None repeats it until :meth:`stop`.

    Raises:
        ImportError: the package for the protocol is missing; names it.
        ValueError: the URL has a question mark, and the protocol's package does not read it as a part of the name.
    """

    def __init__(self, url: str, *, patience_s: float | None = PATIENCE_S) -> None:
        import fsspec  # type: ignore[import-untyped]  # late, as few runs need it; untyped

        self.url = url
        self.patience_s = patience_s
        protocol = url.partition("://")[0]
        try:
            self._root: str = fsspec.get_filesystem_class(protocol)._strip_protocol(url)
            if "?" in url and "?" not in self._root:
                raise ValueError(f"{url}: fsspec takes what follows ? for arguments of {protocol}: choose another name")
            # No caches: other processes write there too.
            self.fs: Any = fsspec.filesystem(
                protocol, use_listings_cache=False, skip_instance_cache=True, **_options(protocol)
            )
        except ImportError as error:
            raise ImportError(f"{url}: {error}") from error
        self.is_conditional = protocol in ("s3", "s3a")  # whether a write can depend on what it replaces
        self.last_error = "none was reported"
        self._has_worked = False
        self._folders = set[str]()  # that exist
        self._stopped = threading.Event()

    def with_patience(self, patience_s: float | None) -> Store:
        """Return a store of the same objects; it counts as reachable if this one has been reached."""
        other = Store(self.url, patience_s=patience_s)
        other._has_worked = self._has_worked
        return other

    def stop(self) -> None:
        """Let operations that are being repeated raise their last error."""
        self._stopped.set()

    def read(self, name: str) -> tuple[bytes, str] | None:
        """Return an object's bytes and its version, for :meth:`write`; None if it does not exist."""

        def attempt() -> tuple[bytes, str]:
            version = self._version(name) if self.is_conditional else ""
            data: bytes = self.fs.cat_file(self._path(name))
            return data, version

        while True:
            try:
                data, version = self._repeated(f"read {name}", attempt)
                if version == (self._repeated(f"read {name}", self._version, name) if version else ""):
                    return data, version  # otherwise it was replaced in between
            except FileNotFoundError as error:
                self._check_bucket(error)
                return None

    def write(self, name: str, data: bytes, *, replaces: str | None = None) -> str:
        """Write an object; return its version, which is "" if the store's writes cannot depend on one.

        Args:
            replaces: the version to replace; "new" if there must be none yet, None or "" for any.
        Raises:
            Replaced: there is another version; only if the store has conditional writes, or for "new".
        """
        options: dict[str, Any] = {}
        if replaces == "new":
            options["mode"] = "create"
        elif replaces and self.is_conditional:
            options["IfMatch"] = replaces

        def attempt() -> str:
            try:
                self._make_parent(name)
                answer = self.fs.pipe_file(self._path(name), data, **options)
            except Exception as error:
                if options and _is_about_condition(error):
                    # Perhaps it was written by an attempt whose answer was lost.
                    with suppress(FileNotFoundError):
                        if self.fs.cat_file(self._path(name)) == data:
                            return self._version(name) if self.is_conditional else ""
                    raise Replaced(name) from error
                if "IfMatch" in options and isinstance(error, FileNotFoundError):
                    self._check_bucket(error)
                    raise Replaced(name) from error
                raise
            if not self.is_conditional:
                return ""
            return str(answer["ETag"]) if isinstance(answer, dict) and "ETag" in answer else self._version(name)

        try:
            return self._repeated(f"write {name}", attempt)
        except FileNotFoundError as error:
            self._check_bucket(error)
            raise

    def put(self, name: str, path: Path, *, report: Callable[[], None] = lambda: None) -> None:
        """Upload a file, a large one in parts; the object exists when it is complete.

        Args:
            report: called when a part is uploaded.
        """
        from fsspec.callbacks import Callback  # type: ignore[import-untyped]

        self._make_parent(name)
        progress = Callback(hooks={"parts": lambda *_, **__: report()})
        try:
            self._repeated(f"write {name}", lambda: self.fs.put_file(str(path), self._path(name), callback=progress))
        except FileNotFoundError as error:
            self._check_bucket(error)
            raise

    def get(self, name: str, path: Path, *, sha256: str | None = None) -> None:
        """Download an object; `path` is created when it is complete.

        Args:
            sha256: its checksum, which is verified.
        Raises:
            FileNotFoundError: it does not exist.
            Damaged: it has another checksum.
        """

        def attempt() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with AtomicFile(path) as temporary:
                self.fs.get_file(self._path(name), str(temporary))
                if sha256 is not None and sha256_of(temporary) != sha256:
                    raise Damaged(f"{self.url}/{name} is damaged: its checksum is wrong")
                if (size := temporary.stat().st_size) < (whole := self.fs.info(self._path(name))["size"]):
                    raise OSError(f"{size} bytes arrived instead of {whole}")

        for _ in range(_NUM_READS - 1):
            try:
                return self._repeated(f"read {name}", attempt)
            except Damaged:  # perhaps on its way
                continue
        return self._repeated(f"read {name}", attempt)

    def delete(self, name: str) -> None:
        """Delete an object, if it is there."""
        with suppress(FileNotFoundError):
            self._repeated(f"delete {name}", lambda: self.fs.rm_file(self._path(name)))

    def exists(self, name: str = "") -> bool:
        """Return whether there is an object of this name."""
        return self._repeated(f"look for {name}", self._exists, name)

    def names(self) -> list[str]:
        """List the objects below the URL, in order. A store may leave out the newest ones."""

        def attempt() -> list[str]:
            self.fs.invalidate_cache()
            return sorted(str(each) for each in self.fs.find(self._root))

        start = self._root.rstrip("/") + "/"
        try:
            found = self._repeated("list objects", attempt)
        except FileNotFoundError as error:
            self._check_bucket(error)
            return []
        return [each.removeprefix(start) for each in found if each.startswith(start)]

    def mark_of(self, name: str) -> str:
        """Return a string that changes if the object does."""
        return self._repeated(f"look for {name}", lambda: str(self.fs.ukey(self._path(name))))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _make_parent(self, name: str) -> None:
        """Create the folder of an object; object stores have none."""
        folder = self._path(name).rpartition("/")[0]
        if not self.is_conditional and folder not in self._folders:
            with suppress(Exception):  # the write says what is wrong
                self.fs.makedirs(folder, exist_ok=True)
            self._folders.add(folder)

    def _exists(self, name: str) -> bool:
        try:
            return bool(self.fs.info(self._path(name))["type"] == "file")
        except FileNotFoundError:
            return False

    def _version(self, name: str) -> str:
        return str(self.fs.info(self._path(name))["ETag"])

    def _check_bucket(self, error: FileNotFoundError) -> None:
        """Raise if it is not the object that is missing, but the bucket."""
        if re.search(r"bucket (does not exist|not found)", str(error), re.IGNORECASE):
            raise FileNotFoundError(f"{self.url}: {error}; create the bucket first") from error

    def _repeated(self, what: str, attempt: Callable[..., T], *args: Any) -> T:
        """Return the result of the first attempt that succeeds."""
        failed_at: float | None = None
        reported_at = -math.inf
        for pause_s in _pauses():
            try:
                result = attempt(*args)
                self._has_worked = True
                return result
            except Exception as error:
                now, self.last_error = time.monotonic(), _message(error)
                failed_at = now if failed_at is None else failed_at
                if not self._may_pass(error):
                    explained = _explained(error, self.url, what)
                    if explained is error:
                        raise
                    raise explained from _shown(error)
                patience_s = self.patience_s if self._has_worked else FIRST_PATIENCE_S
                is_over = patience_s is not None and now - failed_at + pause_s > patience_s
                if is_over or self._stopped.is_set():
                    raise OSError(
                        f"{self.url}: could not {what} for {now - failed_at:.0f} s: {_message(error)}"
                    ) from _shown(error)
                if now - reported_at >= _REPORT_EVERY_S:
                    reported_at = now
                    logger.warning("%s: could not %s, trying again: %s", self.url, what, _message(error))
                self._stopped.wait(pause_s)
        raise AssertionError("pauses do not end")

    def _may_pass(self, error: Exception) -> bool:
        if isinstance(error, PermissionError) or type(error).__name__ in _LASTING_NAMES:
            return self._has_worked  # temporary credentials are renewed
        return not isinstance(error, _LASTING | Replaced)


def _options(protocol: str) -> dict[str, Any]:
    """Return arguments of a file system.

    For S3, they disable botocore's retries, whose pauses draw from Python's global random generator: a fault would
    change the run's random numbers. s3fs and :class:`Store` repeat requests themselves.
    """
    if protocol not in ("s3", "s3a"):
        return {}
    from fsspec.config import conf  # type: ignore[import-untyped]  # as above

    given = conf.get(protocol, {}).get("config_kwargs", {})
    return {"config_kwargs": {**given, "retries": {"total_max_attempts": 1}}}


def _pauses() -> Iterator[float]:
    """Yield times in seconds that double, with a random part, so that many processes do not come back together."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s * random.SystemRandom().uniform(0.5, 1.0)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _is_about_condition(error: BaseException | None) -> bool:
    while error is not None:
        response = getattr(error, "response", None)  # of botocore's errors, None if there was no answer
        code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
        if isinstance(error, FileExistsError) or code in _CONDITION:
            return True
        error = error.__cause__
    return False


def _explained(error: Exception, url: str, what: str) -> Exception:
    """Return the error with the URL and, for one about credentials, what to do."""
    if isinstance(error, PermissionError) or type(error).__name__ in _LASTING_NAMES:
        return PermissionError(
            f"{url}: could not {what}: {_message(error)}; check the store's credentials and their permissions"
        )
    is_other = isinstance(error, OSError) and not isinstance(error, FileNotFoundError | FileExistsError)
    if is_other or _shown(error) is None:
        return OSError(f"{url}: could not {what}: {_message(error)}")
    return error


def _shown(error: Exception) -> Exception | None:
    """Return the cause that a traceback may show: the error, unless its text or that of a cause has credentials."""
    each: BaseException | None = error
    while each is not None:
        if redacted(str(each)) != str(each):
            return None
        each = each.__cause__ or each.__context__
    return error


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {redacted(str(error))}"
