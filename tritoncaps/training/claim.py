"""Only one process at a time may use the folder of a run. The claim ends when the process ends, even if it is killed.

Where the system has no file locks, a file with the name of the owner replaces the lock. This file stays after a crash.
It is ignored if its owner has certainly ended; otherwise the error message names the file to delete.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from tritoncaps.training.config import ConfigError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK, OWNER = ".lock", ".owner"
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)  # errors of file systems without locks

_locked: set[int] = set()  # files that this process has locked


class FolderInUseError(ConfigError):
    """Another process has claimed the folder."""


class Claim:
    """Claims ``folder`` for this process and creates it if necessary. FolderInUseError names another process there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made = [path for path in (folder, *folder.parents) if not path.exists()]
        self._file: int | None = None  # locked; None: there are no locks
        try:
            self._take()
        except OSError as error:
            self._remove_empty()
            raise ConfigError(f"the folder {folder} cannot be used: {error.strerror or error}") from None

    def release(self) -> None:
        """End the claim. Remove the folder if the claim created it and it is empty."""
        if self._file is None:
            (self.folder / OWNER).unlink(missing_ok=True)
        else:
            (self.folder / LOCK).unlink(missing_ok=True)  # while it is locked, so that no other process has it
            _locked.discard(self._file)
            os.close(self._file)
        self._remove_empty()

    def _take(self) -> None:
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # the folder's last owner has just removed it
                self._file = _lock(self.folder / LOCK)
                if self._file is None:
                    return _create(self.folder / OWNER)
                if _is(self._file, self.folder / LOCK):
                    return None

    def _remove_empty(self) -> None:
        with suppress(OSError):  # not empty, or gone
            for path in self._made:
                path.rmdir()


def claim_new(path: Path) -> Claim:
    """Claim the folder ``path``, or the first of ``path``-2, ``path``-3, .. that does not exist yet."""
    number = 1
    while True:
        folder = path if number == 1 else path.with_name(f"{path.name}-{number}")
        number += 1
        if not folder.exists():
            with suppress(FolderInUseError):
                claim = Claim(folder)
                if {entry.name for entry in folder.iterdir()} <= {LOCK, OWNER}:
                    return claim
                claim.release()  # another run has used the folder in the meantime


def _lock(path: Path) -> int | None:
    """Open and lock the file, and write the name of this process into it. None if files cannot be locked."""
    if fcntl is None:
        return None
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        if error.errno in NO_LOCKS:
            path.unlink(missing_ok=True)
            return None
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise FolderInUseError(f"{path.parent} is in use by {_described(_owner(path))}") from None
        raise
    os.truncate(file, 0)
    os.write(file, json.dumps(_self()).encode())
    _locked.add(file)
    return file


def _is(file: int, path: Path) -> bool:
    """True if the locked file is still there. Its last owner may have removed it just before this process locked it."""
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(file), os.stat(path)):
            return True
    _locked.discard(file)
    os.close(file)
    return False


def _create(path: Path) -> None:
    """Without locks: the process that creates the file owns the folder."""
    while True:
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            owner = _owner(path)
            if not _has_ended(owner):
                raise FolderInUseError(
                    f"{path.parent} is in use by {_described(owner)}; if that process has ended, delete {path}"
                ) from None
            path.unlink(missing_ok=True)
        else:
            os.write(file, json.dumps(_self()).encode())
            return os.close(file)


def _self() -> dict[str, str | int]:
    return {"process": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}


def _owner(path: Path) -> dict[str, str | int]:
    try:
        owner = json.loads(path.read_bytes())
    except (OSError, ValueError):  # it has not been written yet
        return {}
    return owner if isinstance(owner, dict) else {}


def _described(owner: dict[str, str | int]) -> str:
    if not {"process", "host", "since"} <= owner.keys():
        return "another process"
    return f"process {owner['process']} on {owner['host']} since {owner['since']}"


def _has_ended(owner: dict[str, str | int]) -> bool:
    """True if the owner has certainly ended. For processes on other machines, and on Windows, that is unknown."""
    process = owner.get("process")
    if os.name != "posix" or owner.get("host") != socket.gethostname() or not isinstance(process, int):
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # the process belongs to another user
        pass
    return False


def _forget() -> None:
    """Close the locks in a forked process, such as one that loads images, so that only the parent holds the folder."""
    for file in _locked:
        os.close(file)
    _locked.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
