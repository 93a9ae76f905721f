"""Who may write a checkpoint, and what unfinished saves leave behind."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import time
from pathlib import Path

from shardwise.errors import CheckpointError

# Note [One writer per name]
# The writer of `name` holds an operating-system lock on `.name.lock` beside it; the file says who
# the writer is. The lock ends with its process, however that ends. After claiming a name, its
# unfinished folders belong to nobody and may be removed. If the file system has no locks, names are
# not claimed and nothing is removed; each job still writes a separate folder, and one of them
# becomes the checkpoint.


#: What `flock` says where there are no locks.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_MAX_OWNER_BYTES = 300


def half_name(name: str, token: str) -> str:
    """The name of a checkpoint until it is complete; each save has its own token."""
    return f".{name}.half-{token}"


def halves(path: Path) -> list[Path]:
    """The folders of unfinished saves of this checkpoint, abandoned or still being written."""
    begin = f".{path.name}.half"
    if not path.parent.is_dir():
        return []
    return [p for p in path.parent.iterdir() if p.name == begin or p.name.startswith(f"{begin}-")]


class Claim:
    """The claim to the checkpoint at `path`; see Note [One writer per name]."""

    def __init__(self, path: Path) -> None:
        """Raises if another job holds the claim, with that job's name."""
        self._path = path
        self._file = path.parent / f".{path.name}.lock"
        self._number = -1
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        while self._number < 0:
            number = os.open(self._file, flags, 0o666)
            try:
                self._has_lock = self._lock(number)
                # The one who had it may have removed the file that was opened.
                if self._is_still_there(number):
                    self._number = number
            finally:
                if self._number < 0:
                    os.close(number)
        if self._has_lock:
            self._sign()

    def _sign(self) -> None:
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        owner = f"process {os.getpid()} on {socket.gethostname()}, since {now}"
        try:
            os.ftruncate(self._number, 0)
            os.pwrite(self._number, owner.encode(), 0)
        except OSError:  # no space: this process must not keep the name claimed
            self.release()
            raise

    def _lock(self, number: int) -> bool:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(number, _MAX_OWNER_BYTES, 0).decode(errors="replace")
            raise CheckpointError(
                f"{self._path} is being written by another job: {owner or 'it just began'}. Wait "
                "for it, or choose another name."
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return False
        return True

    def _is_still_there(self, number: int) -> bool:
        try:
            return os.path.samestat(os.fstat(number), os.stat(self._file))
        except FileNotFoundError:
            return False

    def remove_halves(self) -> None:
        """Remove the leftovers of dead jobs."""
        if self._has_lock:
            for half in halves(self._path):
                if half.is_dir() and not half.is_symlink():
                    shutil.rmtree(half)
                else:
                    half.unlink()

    def release(self) -> None:
        if self._number >= 0:
            self._file.unlink(missing_ok=True)
            os.close(self._number)
            self._number = -1


def remove_dead_halves(folder: Path, prefix: str) -> None:
    """Remove the halves and locks in a folder that no job holds, of names with this prefix."""
    names = set()
    for path in folder.iterdir():
        name, _, last = path.name[1:].rpartition(".")
        remains = last in ("half", "lock") or last.startswith("half-")
        if remains and path.name.startswith(f".{prefix}"):
            names.add(name)
    for name in sorted(names):
        try:
            claim = Claim(folder / name)
        except CheckpointError:
            continue  # another job is writing it
        try:
            claim.remove_halves()
        finally:
            claim.release()
