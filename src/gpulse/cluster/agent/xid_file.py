"""Keep the Xid errors of this boot in a file, so that an agent reports them again after a restart.

The driver reports an Xid error once, to the processes that listen at that moment.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from gpulse.model.xid import Xid, from_document

MAX_AGE_SECONDS = 86_400.0
"""Older errors are not read: nothing says whether the GPU was reset meanwhile."""
_MAX_FILE_BYTES = 4 << 20

_log = logging.getLogger(__name__)


class XidFile:
    """The file of one agent."""

    def __init__(self, path: Path, boot: str) -> None:
        """Prepare to read and write.

        Args:
            path: Of the file.
            boot: Id of this boot of the machine; errors of another one are not read.
        """
        self._path = path
        self._boot = boot
        self._lock = threading.Lock()
        self.xids: Sequence[Xid] = ()
        """The errors to write."""

    def read(self, now: float) -> list[Xid]:
        """Return the errors of this boot that were seen within the last day; none where the file cannot be read."""
        try:
            with open(self._path, "rb") as file:
                document = json.loads(file.read(_MAX_FILE_BYTES))
            if document["boot"] != self._boot or not self._boot:
                return []
            found = [from_document(one) for one in document["xids"]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            _log.warning(
                "Xid errors of earlier agents are not reported: cannot read %s: %s", self._path, error
            )
            return []
        return [xid for xid in found if xid is not None and now - xid.time <= MAX_AGE_SECONDS]

    def write(self) -> None:
        """Replace the file's contents with `xids`; may be called from any thread."""
        draft = f"{self._path}.new"
        with self._lock:
            text = json.dumps({"boot": self._boot, "xids": [xid._asdict() for xid in self.xids]})
            try:
                with open(draft, "w", encoding="utf-8") as file:
                    file.write(text)
                os.replace(draft, self._path)
            except OSError as error:
                _log.warning(
                    "the next agent will not report these Xid errors: cannot write %s: %s", self._path, error
                )
