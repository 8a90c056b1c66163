"""Writing to disk so that nothing is lost: whole files, whole folders, one writer at a time.

What is written has another, unpredictable name until it is whole, is created exclusively and never
through a link, and then takes its place at once: a kill, a full disk or a power cut leaves the old
or the new. Everything here fails with an :class:`OSError` whose ``strerror`` says why; the caller
says what it was doing.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

StrPath = str | os.PathLike[str]

LOCK = ".depthroute-lock"
"""The name of a lock in a folder, and how it ends beside what it locks."""
_UNFINISHED = re.compile(r"\.(?P<name>.+)\.depthroute-[0-9a-f]{12}", re.DOTALL)
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EINVAL)
"""What file systems without locks answer."""


def reason(error: BaseException) -> str:
    """Why something failed, in one line."""
    lines = str(getattr(error, "strerror", None) or error).splitlines()
    return lines[0] if lines else type(error).__name__


def at_home(path: StrPath) -> Path:
    """``path`` with a ``~`` made the home folder; a user that is not known is a name like others,
    where :meth:`Path.expanduser` would fail."""
    return Path(os.path.expanduser(path))


def destination(path: StrPath) -> Path:
    """Where ``path`` is written: a link stays and what it points to changes."""
    if not os.fspath(path):
        raise FileNotFoundError(errno.ENOENT, "the path is empty; give a name")
    place = Path(os.path.realpath(at_home(path)))
    if place.is_symlink():
        raise OSError(errno.ELOOP, "it is a link that leads back to itself")
    return place


def unfinished_name(name: str) -> str:
    """What ``name`` is called until it is whole."""
    return f".{name}.depthroute-{secrets.token_hex(6)}"


def is_unfinished(name: str, of: str | None = None) -> bool:
    """Whether a killed process left this behind; ``of`` is the name it would have had."""
    match = _UNFINISHED.fullmatch(name)
    return match is not None and of in (None, match["name"])


def write_text(path: StrPath, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: StrPath, data: bytes) -> None:
    """The whole file at once, with the mode of the one it replaces.

    A link at ``path`` itself is replaced; where a user named it, ask :func:`destination` first.
    """
    path = Path(path)
    if path.is_dir() and not path.is_symlink():
        raise IsADirectoryError(errno.EISDIR, "it is a folder; give a file")
    mode = stat.S_IMODE(path.stat().st_mode) if path.is_file() and not path.is_symlink() else None
    _clear_files(path.parent, path.name)
    temporary = path.with_name(unfinished_name(path.name))
    # held while it is written, so that another process sees that its writer lives
    handle = _open_held(temporary, os.O_WRONLY | os.O_EXCL, 0o666 if mode is None else 0o600)
    try:
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def create(path: Path, pieces: Iterable[bytes | memoryview]) -> str:
    """A new file of these pieces, on the disk; the SHA-256 that it should have."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    digest = hashlib.sha256()
    with open(os.open(path, flags, 0o666), "wb") as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def write_named(path: StrPath, text: str) -> None:
    """A file whose path the user gave: through links, into a new folder, to a pipe or a device."""
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():  # cannot be replaced
        path.write_text(text, encoding="utf-8")
        return
    place = destination(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    write_text(place, text)


def open_to_append(path: Path) -> int:
    """A file that grows; made if need be, and never through a link."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o666)


def point(link: Path, name: str) -> None:
    """``link`` leads to ``name`` beside it, and always to something."""
    temporary = link.with_name(unfinished_name(link.name))
    temporary.symlink_to(name)
    try:
        temporary.replace(link)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def own_folder(path: Path) -> Path:
    """``path``, where nobody else can put files; another if somebody else has made it.

    For what is trusted when it is found again, in a folder that everybody can write.
    """
    with suppress(FileExistsError):
        path.mkdir(0o700, parents=True)
    found = path.stat(follow_symlinks=False)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return Path(tempfile.mkdtemp(prefix=f"{path.name}-", dir=path.parent))
    if found.st_mode & 0o022:
        path.chmod(stat.S_IMODE(found.st_mode) & ~0o022)
    return path


def sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def sync(folder: Path) -> None:
    """All that ``folder`` holds is on the disk: a power cut after its renaming loses nothing."""
    for item in [folder, *folder.rglob("*")]:
        if item.is_symlink():
            continue
        if item.is_dir():
            sync_folder(item)
        elif item.is_file():
            sync_file(item)


def sync_file(path: Path) -> None:
    with path.open("rb") as handle:
        os.fsync(handle.fileno())


def sync_folder(folder: Path) -> None:
    """The names in ``folder`` are on the disk."""
    with suppress(OSError):  # some file systems cannot sync a folder
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def replacing(
    path: StrPath, superseded: Callable[[Path, Path], Collection[str]] = lambda old, new: ()
) -> Iterator[Path]:
    """A folder to write into that takes the place of ``path`` at once when the block ends.

    What the old folder holds and the new one does not is kept, but for the names that
    ``superseded(old, new)`` gives; it may also refuse by raising. Modes are kept. If the block
    fails or the process dies, ``path`` is as it was; meanwhile no other process can write there.
    """
    target = destination(path)
    _refuse_irreplaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with lock(target.with_name(f".{target.name}{LOCK}")):
        _restore(target)
        clear(target.parent, target.name)
        temporary = target.with_name(unfinished_name(target.name))
        temporary.mkdir(0o700 if target.exists() else 0o777)
        try:
            yield temporary
            sync(temporary)
            if target.exists():
                _keep(target, temporary, superseded(target, temporary))
            put_in_place(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _refuse_irreplaceable(target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "it is a file; give a folder")
    if target.exists() and not os.access(target, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    if Path.cwd().is_relative_to(target):
        raise OSError(
            errno.EBUSY,
            "it is the folder this command works in or one above it, and would be replaced as a "
            f"whole; give a folder of its own, such as {str(target / 'model')!r}",
        )
    if target.is_mount():
        raise OSError(
            errno.EBUSY,
            "a file system is mounted there, and a folder is replaced as a whole; give a folder "
            f"inside, such as {str(target / 'model')!r}",
        )


def _keep(old: Path, new: Path, dropped: Collection[str] = ()) -> None:
    """Put what only ``old`` holds into ``new``, and give ``new`` the modes of ``old``."""
    for item in old.iterdir():
        target = new / item.name
        if item.name in dropped:
            continue
        if not os.path.lexists(target):
            _carry(item, target)
        elif not item.is_symlink() and item.is_dir() and target.is_dir():
            _keep(item, target)
        elif not item.is_symlink() and item.is_file() and target.is_file():
            shutil.copymode(item, target)
    shutil.copystat(old, new)


def _carry(item: Path, target: Path) -> None:
    if item.is_symlink():
        target.symlink_to(item.readlink())
    elif item.is_dir():
        target.mkdir(0o700)
        _keep(item, target)
    else:
        try:
            os.link(item, target)
        except OSError:  # no hard links on this file system, or not to another user's file
            shutil.copy2(item, target)


def put_in_place(temporary: Path, target: Path) -> None:
    """``temporary`` becomes ``target``; a folder that was there has the temporary name then."""
    if not target.exists():
        temporary.rename(target)
    elif not _exchange(temporary, target):
        # no atomic exchange on this system: killed between two renames, the old folder has another
        # name until the next save, and is never removed before the new one is in place
        aside = _aside(target)
        target.rename(aside)
        try:
            temporary.rename(target)
        except OSError:
            aside.rename(target)
            raise
        shutil.rmtree(aside)
    sync_folder(target.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders atomically (Linux renameat2); False where that does not exist."""
    at_cwd, exchange = -100, 2
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), exchange) == 0


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.depthroute-old")


def _restore(target: Path) -> None:
    """After a kill between the two renames of :func:`put_in_place`."""
    aside = _aside(target)
    if aside.is_dir() and not aside.is_symlink():
        if target.exists():
            shutil.rmtree(aside)
        else:
            aside.rename(target)


def remove(folder: Path) -> None:
    """Renamed first: killed half way, what is left has no name that means anything."""
    if folder.is_symlink():
        folder.unlink()
        return
    shutil.rmtree(folder.rename(folder.with_name(unfinished_name(folder.name))))


def clear(folder: Path, of: str | None = None) -> None:
    """Remove what killed writers left in ``folder``; who calls this holds the lock on it."""
    for item in folder.iterdir():
        if is_unfinished(item.name, of) and item.is_symlink():
            item.unlink()
        elif is_unfinished(item.name, of) and item.is_dir():
            shutil.rmtree(item, ignore_errors=True)
    _clear_files(folder, of)


def _clear_files(folder: Path, of: str | None) -> None:
    """Files that nobody is writing any more."""
    with suppress(OSError):  # a folder that cannot be listed
        for name in os.listdir(folder):
            if is_unfinished(name, of):
                with suppress(OSError):
                    _clear_file(folder / name)


def _clear_file(path: Path) -> None:
    if path.is_symlink() or not path.is_file():
        return
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if _hold(handle, wait=False):
            path.unlink()
    finally:
        os.close(handle)


class Lock:
    """Held until it is released or its process ends, in whatever way."""

    def __init__(self, path: Path, handle: int) -> None:
        self.path, self._handle, self._process = path, handle, os.getpid()
        self._end = weakref.finalize(self, _unlock, path, handle, self._process)
        _locks.add(self)

    @property
    def is_held(self) -> bool:
        """By this process; a fork of it holds nothing."""
        return self._end.alive and self._process == os.getpid()

    def release(self) -> None:
        self._end()

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def let_go(self) -> None:
        """In a fork, which would else hold the lock on when its parent is gone."""
        if self._end.detach() is not None:
            os.close(self._handle)


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def _let_go_of_all() -> None:
    for held in list(_locks):
        held.let_go()


os.register_at_fork(after_in_child=_let_go_of_all)


def _unlock(path: Path, handle: int, process: int) -> None:
    if process == os.getpid():
        with suppress(OSError):
            path.unlink()
        os.close(handle)


def lock(path: Path, *, wait: bool = False) -> Lock:
    """The lock that a file at ``path`` stands for; the file is gone when it is released.

    It is the system that holds the lock, and lets go of it when the process dies: a file that was
    left behind holds nobody up. Where the file system has no locks there is none.
    """
    try:
        handle = _open_held(path, os.O_RDWR, 0o666, wait=wait)
    except BlockingIOError as error:
        raise BlockingIOError(
            errno.EAGAIN, f"{_holder(path)} is writing there; wait until it ends"
        ) from error
    with suppress(OSError):  # a full disk; the lock is held all the same
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()} {socket.gethostname()}\n".encode())
    return Lock(path, handle)


def is_locked(path: Path) -> bool:
    """Whether some process holds this lock now; asking leaves it as it is."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _NO_LOCKS
    finally:
        os.close(handle)
    return False


def _holder(path: Path) -> str:
    try:
        number, host = path.read_text().split()
    except (OSError, ValueError):
        return "another process"
    return f"process {number}" + ("" if host == socket.gethostname() else f" on {host}")


def _open_held(path: Path, flags: int, mode: int, *, wait: bool = True) -> int:
    """An open, locked file that ``path`` names: not one that its last holder has just removed."""
    while True:
        handle = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        try:
            _hold(handle, wait=wait)
            if _names(path, handle):
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _hold(handle: int, *, wait: bool) -> bool:
    """False where the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True


def _names(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(handle))
    except FileNotFoundError:
        return False
