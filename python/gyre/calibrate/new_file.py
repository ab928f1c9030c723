"""Files that are at their path as a whole or not at all, and are read only if they are files: as snapshots are (docs/snapshots.md)."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile

import gyre


def replace(op: str, path: str | os.PathLike, content: bytes) -> None:
    """Writes a private temporary file beside `path`, syncs it and renames it. A link is followed. The new file has the mode of the
    one that it replaces, if both have the same owner; a file that is new is its owner's alone."""
    path = _whole(op, path)
    unfinished = folder = None
    try:
        if path.endswith("/") or (os.path.lexists(path) and not stat.S_ISREG(os.stat(path).st_mode)):
            raise gyre.IoError(f"{op}: {path}: is not a regular file")
        target = os.path.realpath(path)
        # First: after the rename nothing is left that can fail.
        folder = os.open(os.path.dirname(target), os.O_RDONLY | os.O_DIRECTORY)
        descriptor, unfinished = tempfile.mkstemp(prefix=".gyre-", suffix=".tmp", dir=os.path.dirname(target))
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            _keep_mode(file.fileno(), target)
            os.fsync(file.fileno())
        os.rename(unfinished, target)
        unfinished = None
        with contextlib.suppress(OSError):  # a file system that does not sync folders; the file is there
            os.fsync(folder)
    except OSError as error:
        raise gyre.IoError(f"{op}: {path}: {error.strerror or error}") from error
    finally:
        if folder is not None:
            os.close(folder)
        if unfinished is not None:
            os.unlink(unfinished)


def regular(op: str, path: str | os.PathLike) -> str:
    """The path of a file to read: nobody waits for a pipe."""
    path = _whole(op, path)
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise gyre.IoError(f"{op}: {path}: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        raise gyre.IoError(f"{op}: {path}: is not a regular file")
    return path


def _whole(op: str, path: str | os.PathLike) -> str:
    path = os.fsdecode(path)
    if not path:
        raise gyre.InvalidArgument(f"{op}: the path is empty")
    if "\0" in path:
        raise gyre.InvalidArgument(f"{op}: the path has a NUL at character {path.index(chr(0))}")
    return path


def _keep_mode(descriptor: int, target: str) -> None:
    try:
        old = os.stat(target)
    except FileNotFoundError:
        return
    new = os.fstat(descriptor)
    if old.st_uid != new.st_uid:
        return
    mode = old.st_mode & 0o777
    if old.st_gid != new.st_gid:
        try:
            os.fchown(descriptor, -1, old.st_gid)
        except OSError:
            mode &= ~0o070  # another group may not see what the old file's group could
    os.fchmod(descriptor, mode)
