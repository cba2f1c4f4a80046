"""Tells whether somebody writes a store, without becoming the one who does."""

from __future__ import annotations

import fcntl
import os


def holder(directory: str) -> int | None:
    """The process that writes a store, 0 when it does not say which; None when nobody does."""
    try:
        file = os.open(f"{directory}/log/lock", os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(file, 20, 0).strip()
        return int(text) if text.isdigit() else 0
    finally:
        os.close(file)
    return None
