"""`gpulse harvest` on a machine that has no inotify to give: everything waits for the next look."""

from __future__ import annotations

from functools import partial

from gpulse.cli import harvest
from gpulse.cli.entry import main
from gpulse.harvest.watch.watcher import Watcher

if __name__ == "__main__":
    setattr(harvest, "Watcher", partial(Watcher, inotify=False))  # noqa: B010  it is not exported
    main()
