"""URLs of logdirs, and the local folders that stand for them."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from urllib.parse import quote, unquote, unquote_to_bytes

from runnerkit.support.redaction import redacted

STAGING = "RUNNERKIT_STAGING"
COPY = "copy-"  # begins the name of a folder with copies of what is in stores
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/+)(.+)", re.DOTALL)
_FILE_URL = re.compile(r"(?:file|local):(?=/)(?://([^/]*))?(.*)", re.DOTALL | re.IGNORECASE)  # its host and path
# A password may contain a slash. A number after the colon is a port, and an access point of S3 has colons.
_PASSWORD = re.compile(r"(?!arn:)[^/:\[]*:(?:[^/]*@|(?!\d+/)[^@]*@)")
_roots: list[Path] = []  # of staging folders that this process has used; the variable may change
_LONGEST = 200  # characters of a folder's name, without those that file systems reserve


def as_url(path: str | os.PathLike[str]) -> str | None:
    """Return the URL of a store that `path` is, also if :class:`Path` removed a slash from it; None for a local path.

    Raises:
        ValueError: its protocol is unknown, it is a chain of several, or it contains a credential.

    >>> as_url("s3://bucket/run/"), as_url(Path("s3://bucket/run")), as_url("logs/run"), as_url("file:///logs/run")
    ('s3://bucket/run', 's3://bucket/run', None, None)
    """
    text = os.fspath(path)
    if not isinstance(text, str):
        return None
    if "::" in text and ":/" in text:
        raise ValueError(f"{redacted(text)}: chains of protocols are not supported; pass one, such as s3://bucket/run")
    match = _URL.fullmatch(text)
    if match is None:
        return None
    protocol, rest = match[1].lower(), re.sub("/+", "/", match[3]).rstrip("/")
    if protocol in ("file", "local"):
        return None
    if _PASSWORD.match(rest) or ("?" in rest and redacted(rest) != rest):
        raise ValueError(
            "a URL with a credential (a password, a token or a signature) would be written to logs: configure "
            f"{protocol} by environment variables or by fsspec's configuration files, and remove the credential"
        )
    known = _protocols()
    if protocol not in known:
        if len(match[2]) == 1:  # a local path with a colon
            return None
        raise ValueError(f"fsspec does not know {protocol}://, but {', '.join(sorted(known))}")
    if "?versionid=" in rest.lower():
        raise ValueError(f"{text} is one version of an object, which is not supported: copy the object")
    if not rest:
        raise ValueError(f"{text} names no bucket or folder: pass a URL such as s3://bucket/run")
    return f"{protocol}://{rest}"


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return an absolute path: of `path` itself, or of the staging folder if it is a URL.

    >>> local_path("file:///logs/run").as_posix()
    '/logs/run'
    """
    url = as_url(path)
    return folder_for(url, root()) if url is not None else plain_path(path).absolute()


def plain_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file on this machine, which may be a file:// URL, whose percent-encoding is decoded.

    Raises:
        ValueError: the URL names another host or no path.

    >>> plain_path("logs/run").as_posix(), plain_path(Path("file:///logs/my%20run")).as_posix()
    ('logs/run', '/logs/my run')
    """
    text = os.fspath(path)
    match = _FILE_URL.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return Path(text)
    if (match[1] or "").lower() not in ("", "localhost") or not match[2]:
        raise ValueError(
            f"{redacted(text)} is not the URL of an absolute path on this machine: pass file:///folder, or the path"
        )
    name = os.fsdecode(unquote_to_bytes(os.fsencode(match[2]))).lstrip("/")
    has_drive = sys.platform == "win32" and name[1:2] == ":"
    return Path(name if has_drive else f"/{name}")


def folder_for(url: str, parent: Path) -> Path:
    """Return the folder in `parent` that stands for a URL; :func:`url_of` is the inverse.

    >>> folder_for("s3://bucket/a,b/run", Path("staging")).as_posix()
    'staging/s3,,bucket,a%2Cb,run'
    """
    protocol, _, rest = url.partition("://")
    name = f"{protocol},,{quote(rest, safe='').replace('%2F', ',')}"
    parts = [name[start : start + _LONGEST] for start in range(0, len(name), _LONGEST)]
    if set(parts[-1]) == {"."}:  # a file system resolves "." and ".."
        parts[-1] = parts[-1].replace(".", "%2E")
    return parent.joinpath(*(f"{part}+" for part in parts[:-1]), parts[-1])


def url_of(path: Path) -> str | None:
    """Return the URL that a path in a staging folder, or in a copy, stands for; None for any other path."""
    _root_name()
    above = next((each for each in _roots if path.is_relative_to(each)), None)
    if above is None:
        return None
    parts = list(path.relative_to(above).parts)
    if parts and parts[0].startswith(COPY):
        del parts[0]
    name = ""
    while parts:
        part = parts.pop(0)
        name += part.removesuffix("+")
        if not part.endswith("+"):
            break
    protocol, commas, rest = name.partition(",,")
    return f"{protocol}://{'/'.join([unquote(rest.replace(',', '/')), *parts])}" if commas else None


def is_copy(path: Path) -> bool:
    """Return whether a path is in a copy that a process of this machine made."""
    return any(each.name.startswith(COPY) and each.parent in _roots for each in path.parents) and path.exists()


def shown(path: str | os.PathLike[str]) -> str:
    """Return what a user calls a path: the URL, if it stands for one."""
    return url_of(Path(path)) or str(path)


def root() -> Path:
    """Return the folder of all staging folders, created if needed: ``$RUNNERKIT_STAGING``, or a private temporary one.

    Raises:
        PermissionError: another user owns it.
    """
    folder = _root_name()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Without following a link: another user may have created one in the folder of temporary files.
    user = _user_id()
    if user is not None and {folder.stat().st_uid, _given_root().lstat().st_uid} != {user}:
        raise PermissionError(f"{_given_root()} belongs to another user: set {STAGING} to a folder of your own")
    return folder


def _root_name() -> Path:
    if os.environ.get(STAGING):  # the run, and the processes that it starts, may have another working directory
        os.environ[STAGING] = os.path.abspath(os.environ[STAGING])
    folder = _given_root().resolve()
    if folder not in _roots:
        _roots.append(folder)
    return folder


def _given_root() -> Path:
    user = _user_id()
    name = f"runnerkit-{'user' if user is None else user}"
    return Path(os.environ.get(STAGING) or os.path.join(tempfile.gettempdir(), name))


def _user_id() -> int | None:
    return os.getuid() if sys.platform != "win32" else None


def _protocols() -> set[str]:
    # Late, as few runs need it; untyped.
    from fsspec.registry import known_implementations, registry  # type: ignore[import-untyped]

    return {*known_implementations, *registry}
