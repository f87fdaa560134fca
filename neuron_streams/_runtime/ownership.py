"""Whether another user could have put a file where it is, and so decide what runs as this one."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

__all__ = ["why_not_ours"]

_MOST_LINKS = 40  # on one path, as in Linux


def why_not_ours(path: Path) -> str | None:
    """What lets another user, root aside, decide what a path holds; None if nothing does.

    Raises OSError if it cannot be looked at.
    """
    found = path.stat()
    for link in _links(path):
        if _is_foreign(link.lstat().st_uid):
            return f"goes through the link {link} of another user ({_name(link.lstat().st_uid)})"
    if _is_foreign(found.st_uid):
        return f"belongs to another user ({_name(found.st_uid)})"
    if found.st_mode & stat.S_IWOTH:
        return "may be written by every user"
    if found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid):
        return f"may be written by other users (group {found.st_gid})"
    return None


def _is_foreign(uid: int) -> bool:
    return uid not in (0, os.geteuid())


def _is_own_group(gid: int) -> bool:
    """Whether a group is that of root, or one that holds this user alone, as on many systems."""
    if gid == 0:
        return True
    with contextlib.suppress(KeyError):
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
        own = user.pw_gid == gid and group.gr_name == user.pw_name
        return own and set(group.gr_mem) <= {user.pw_name}
    return False


def _name(uid: int) -> str:
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return f"uid {uid}"


def _links(path: Path) -> Iterator[Path]:
    """The symbolic links on the way to an absolute path."""
    parts, place, seen = list(reversed(path.parts)), Path("/"), 0
    while parts and seen < _MOST_LINKS:
        here = place / parts.pop()
        if here.is_symlink():
            yield here
            seen += 1
            parts.extend(reversed(Path(os.readlink(here)).parts))
        else:
            place = here
