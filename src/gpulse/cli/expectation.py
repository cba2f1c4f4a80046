"""The nodes that a head should hear of, from a list that people edit while it runs."""

from __future__ import annotations

import logging
from pathlib import Path

from gpulse.errors import GpulseError

log = logging.getLogger(__name__)


class NodeList:
    """The names in a list of nodes, read again when the file changed."""

    def __init__(self, path: Path) -> None:
        """Read it for the first time.

        Raises:
            GpulseError: It cannot be read, or is no list of nodes.
        """
        self._path = path.absolute()
        self._stamp = self._stamped()
        self._names = self._read()

    def __call__(self) -> tuple[str, ...]:
        """The names as they are now; those of before while the file cannot be understood."""
        stamp = self._stamped()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._names = self._read()
                log.info("%d nodes are expected", len(self._names))
            except GpulseError as error:
                log.warning("the list of nodes is not taken: %s", error.message)
        return self._names

    def _stamped(self) -> tuple[int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size

    def _read(self) -> tuple[str, ...]:
        from gpulse.deploy.nodes import read_nodes  # noqa: PLC0415  most heads have no list
        from gpulse.deploy.ssh import check_destination  # noqa: PLC0415

        names = []
        for node in read_nodes(self._path):
            try:
                check_destination(node)
                names.append(node.name or node.reached)
            except GpulseError as error:
                log.warning("%s, %s is left out: %s", self._path, node.place, error.message)
        return tuple(names)
