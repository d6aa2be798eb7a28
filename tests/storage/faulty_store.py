"""A store in memory, ``faulty://``, whose operations fail as a test wants."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

PROTOCOL = "faulty"
Fault = Callable[[str, str], None]


def no_fault(operation: str, path: str) -> None:
    pass


class FaultyFileSystem(MemoryFileSystem):
    """Memory in which each operation first calls a function, which may raise, wait or count.

    Attributes:
        fault: the function; its arguments are an operation (read, write, put, get, delete, list or info) and a path.
        hides_new: listings are empty, as those of stores whose listings are consistent only eventually may be.
        calls: operations and paths so far.
    """

    protocol = PROTOCOL
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    fault: ClassVar[Fault] = staticmethod(no_fault)
    hides_new: ClassVar[bool] = False
    calls: ClassVar[list[tuple[str, str]]] = []
    _lock: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix(f"{PROTOCOL}://"))

    @classmethod
    def reset(cls) -> None:
        """Forget objects, faults and calls."""
        cls.store.clear()
        cls.pseudo_dirs[:] = [""]
        cls.calls.clear()
        cls.fault, cls.hides_new = staticmethod(no_fault), False

    @classmethod
    def fail(cls, fault: Fault) -> None:
        """Call `fault` before each operation from now on."""
        cls.fault = staticmethod(fault)

    @classmethod
    def fail_times(cls, number: int, error: BaseException | type[BaseException], *, operation: str = "") -> None:
        """Let the next operations raise `error`: all, or only those of one kind."""
        left = [number]

        def fault(called: str, path: str) -> None:
            with cls._lock:
                if operation in ("", called) and left[0] > 0:
                    left[0] -= 1
                    raise error

        cls.fail(fault)

    @classmethod
    def num(cls, operation: str, ending: str = "") -> int:
        """Count the calls of an operation for paths that end so."""
        return sum(called == operation and path.endswith(ending) for called, path in cls.calls)

    def _begin(self, operation: str, path: str) -> None:
        self.calls.append((operation, path))
        type(self).fault(operation, path)

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> Any:
        self._begin("read", path)
        return super().cat_file(path, *args, **kwargs)

    def pipe_file(self, path: str, *args: Any, **kwargs: Any) -> Any:
        self._begin("write", path)
        return super().pipe_file(path, *args, **kwargs)

    def put_file(self, lpath: str, rpath: str, *args: Any, **kwargs: Any) -> Any:
        self._begin("put", rpath)
        return super().put_file(lpath, rpath, *args, **kwargs)

    def get_file(self, rpath: str, lpath: str, *args: Any, **kwargs: Any) -> Any:
        self._begin("get", rpath)
        return super().get_file(rpath, lpath, *args, **kwargs)

    def rm_file(self, path: str) -> None:
        self._begin("delete", path)
        super().rm_file(path)

    def find(self, path: str, *args: Any, **kwargs: Any) -> Any:
        self._begin("list", path)
        return [] if self.hides_new else super().find(path, *args, **kwargs)

    def info(self, path: str, **kwargs: Any) -> Any:
        self._begin("info", path)
        return super().info(path, **kwargs)


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """Let fsspec know the protocol."""
    fsspec.register_implementation(PROTOCOL, FaultyFileSystem, clobber=True)  # it cannot be undone
    FaultyFileSystem.reset()
    yield
    FaultyFileSystem.reset()
