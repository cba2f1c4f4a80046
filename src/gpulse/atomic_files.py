"""Write files atomically, and never where another user of the machine has put a link or a file.

Readers see the old content or the new, never a part.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

_NO_HARD_LINK_ERRORS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})
"""Errors of file systems without hard links."""
_MAX_NAME_BYTES = 255
"""Length of a file name that every common file system accepts."""
_MAX_LINKS = 40
"""Symbolic links that the kernel follows in one path."""
_ROOT_UID = 0
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def resolve_output(path: str | os.PathLike[str]) -> str:
    """Return where output for a path goes: its symbolic links are followed, unless another user has put them there.

    Open the result with O_NOFOLLOW. What is in /proc, or does not exist yet, is returned as it is.

    Raises:
        OSError: With ELOOP, a link or the file itself belongs to another user, who can have put it there; or a
            directory cannot be read.
    """
    path = os.fspath(path)
    absolute = path if path.startswith("/") else os.path.join(os.getcwd(), path)
    waiting = absolute.split("/")[::-1]
    current, links = "/", 0
    while waiting:
        part = waiting.pop()
        if part in ("", "."):
            continue
        if part == "..":
            current = os.path.dirname(current)
            continue
        entry = os.path.join(current, part)
        rest = os.path.join(entry, *waiting[::-1])
        if entry.startswith("/proc/"):  # its links need not have a path, such as that of a pipe
            return rest
        try:
            found = os.lstat(entry)
        except FileNotFoundError:
            return rest
        is_link = stat.S_ISLNK(found.st_mode)
        if is_link or not waiting:
            _check_owner(entry, found, is_last=not waiting)
        if not is_link:
            current = entry
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, "there are too many symbolic links in its path")
        target = os.readlink(entry)
        if target.startswith("/"):
            current = "/"
        waiting += target.split("/")[::-1]
    return current


def open_output(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """Open a file for writing as `os.open` does, but refuse links and files that another user has put there.

    Args:
        path: The file. With O_EXCL it must not exist, not even as a link.
        flags: As for `os.open`; O_NOFOLLOW and O_CLOEXEC are added.
        mode: The permissions of a new file before the umask.

    Raises:
        OSError: As `resolve_output`, or the file cannot be opened.
    """
    is_new = bool(flags & os.O_EXCL)
    place = _resolve_directory(path) if is_new else resolve_output(path)
    if not place.startswith("/proc/"):  # where a link is not a path: /dev/stdout leads to one
        flags |= os.O_NOFOLLOW
    descriptor = os.open(place, flags | os.O_CLOEXEC, mode)
    try:
        if not is_new and flags & os.O_NOFOLLOW:  # it may have been put there only now
            _check_owner(place, os.fstat(descriptor), is_last=True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_private_directory(directory: str | os.PathLike[str]) -> None:
    """Refuse a directory that another user can change or replace, itself or the directories directly in it.

    Links and files of another user are refused wherever they are in it. One that does not exist yet is refused only
    because of its parents.

    Raises:
        PermissionError: Another user can write to it, or has put something there; `filename` is the directory or file
            that is the reason.
        OSError: As `resolve_output`, or a directory cannot be read.
    """
    place = resolve_output(directory)
    with suppress(FileNotFoundError):
        _check_private(place, os.stat(place))
        _check_entries(place)
    parent = place
    while parent != "/":
        parent = os.path.dirname(parent)
        with suppress(FileNotFoundError):
            mode = os.stat(parent).st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                raise PermissionError(
                    errno.EPERM, f"other users can replace it, because they can write to {parent}", parent
                )


def _check_entries(top: str) -> None:
    """Refuse links and files of another user in a directory, and directories directly in it that others can write to."""
    waiting, seen = [top], set[tuple[int, int]]()
    while waiting:
        directory = waiting.pop()
        with suppress(FileNotFoundError), os.scandir(directory) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    if found.st_uid not in (os.geteuid(), _ROOT_UID):
                        raise PermissionError(
                            errno.EPERM,
                            f"{entry.path} belongs to another user (UID {found.st_uid})",
                            entry.path,
                        )
                    if not entry.is_dir():
                        continue
                    found = entry.stat()
                    if directory == top:
                        _check_private(entry.path, found)
                    if (found.st_dev, found.st_ino) not in seen:  # a link can lead back
                        seen.add((found.st_dev, found.st_ino))
                        waiting.append(entry.path)


def _check_private(directory: str, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise PermissionError(
            errno.EPERM, f"{directory} belongs to another user (UID {found.st_uid})", directory
        )
    if found.st_mode & _OTHERS_WRITE:
        mode = f"{stat.S_IMODE(found.st_mode):o}"
        raise PermissionError(errno.EPERM, f"other users can write to {directory} (mode {mode})", directory)


def _check_owner(path: str, found: os.stat_result, *, is_last: bool) -> None:
    """Refuse a link or file that another user can have put at a path.

    What the owner of a directory has put there is accepted, except a link as the file itself: whoever writes to a
    directory of another user relies on them. A file in a directory that a group shares is accepted too. A directory of
    another user is not refused: people share them, and files in it are created and checked one by one.
    """
    if stat.S_ISDIR(found.st_mode):
        return
    is_link, is_file = stat.S_ISLNK(found.st_mode), stat.S_ISREG(found.st_mode)
    is_ours = found.st_uid in (os.geteuid(), _ROOT_UID)
    if is_ours and (not is_file or found.st_nlink < 2):
        return
    directory = os.stat(os.path.dirname(path))
    is_public = bool(directory.st_mode & stat.S_IWOTH)
    if is_ours:
        if is_public:  # a second name can lead to any file of ours
            raise OSError(errno.ELOOP, f"{path} is a hard link in a directory that everybody can write to")
        return
    is_private = not directory.st_mode & _OTHERS_WRITE
    is_planted = directory.st_uid != found.st_uid and (is_public or is_link or (is_file and is_private))
    if is_planted or (is_link and is_last):
        kind = "symbolic link" if is_link else "file"
        raise OSError(errno.ELOOP, f"{path} is a {kind} of another user (UID {found.st_uid})")


def _resolve_directory(path: str | os.PathLike[str]) -> str:
    """Return a path whose directory is resolved and whose last part is as given."""
    directory, name = os.path.split(os.fspath(path))
    return os.path.join(resolve_output(directory or "."), name)


def replace_file(
    path: str | os.PathLike[str],
    data: bytes,
    mode: int = 0o666,
    *,
    has_umask: bool = True,
    durable: bool = True,
) -> None:
    """Replace a file atomically; a symbolic link is replaced, not followed.

    Args:
        path: The file.
        data: Its whole content.
        mode: Its permissions.
        has_umask: Whether the umask applies to the permissions.
        durable: Whether the file must survive a power loss.

    Raises:
        OSError: The file cannot be written, and the old one is unchanged; or another user has put it there (ELOOP); or
            the directory cannot be synced, and a power loss may undo the replacement.
    """
    path = _resolve_directory(path)
    with suppress(FileNotFoundError):
        _check_owner(path, os.lstat(path), is_last=True)
    temporary = _write_temporary_file(path, data, mode, has_umask=has_umask, durable=durable)
    try:
        os.replace(temporary, path)
    except BaseException:
        _remove(temporary)
        raise
    if durable:
        sync_directory(os.path.dirname(path) or ".")


def create_file(path: str | os.PathLike[str], data: bytes, mode: int = 0o666) -> None:
    """Create a file atomically and durably; never replace an existing one.

    Args:
        path: The file.
        data: Its whole content.
        mode: Its permissions before the umask.

    Raises:
        FileExistsError: The name is taken.
        OSError: The file cannot be written.
    """
    path = _resolve_directory(path)
    temporary = _write_temporary_file(path, data, mode, has_umask=True, durable=True)
    try:
        move_to_new_name(temporary, path)
    finally:
        _remove(temporary)
    sync_directory(os.path.dirname(path) or ".")


def move_to_new_name(source: str, target: str) -> None:
    """Rename a file without ever replacing another; the old name may remain as a second link.

    Raises:
        FileExistsError: The new name is taken.
        OSError: The file cannot be moved.
    """
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_HARD_LINK_ERRORS:
            raise
        os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))  # reserves the name
        os.replace(source, target)


def make_directories(directory: str) -> None:
    """Create a private directory and the missing ones above it, durably; existing ones keep their permissions.

    Raises:
        OSError: A directory cannot be created or synced.
    """
    parent = os.path.dirname(os.path.abspath(directory))
    if os.path.isdir(directory):
        with suppress(
            PermissionError
        ):  # synced even so: the process that created it may have been killed before
            sync_directory(parent)
        return
    if not os.path.isdir(parent):
        make_directories(parent)
    with suppress(FileExistsError):
        os.mkdir(directory, 0o700)
    sync_directory(parent)


def sync_directory(directory: str) -> None:
    """Make the creation, renaming and removal of files in a directory durable.

    Raises:
        OSError: The directory cannot be synced.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_temporary_file(path: str, data: bytes, mode: int, *, has_umask: bool, durable: bool) -> str:
    """Write the content to a temporary file in the same directory, and return its path."""
    directory, name = os.path.split(path)
    suffix = f".{os.urandom(4).hex()}.part"
    max_bytes = _MAX_NAME_BYTES - len(f".{suffix}")
    start = os.fsencode(name)[:max_bytes].decode(errors="ignore")
    temporary = os.path.join(directory, f".{start}{suffix}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, mode), "wb") as file:
            if not has_umask:
                os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            if durable:
                os.fdatasync(file.fileno())
    except BaseException:
        _remove(temporary)
        raise
    return temporary


def _remove(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)
