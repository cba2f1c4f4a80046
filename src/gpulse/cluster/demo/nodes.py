"""The simulated nodes of the demo, all in one process: `python -m gpulse.cluster.demo.nodes`.

Every node is an agent of its own, with a stream of its own; what they sample costs so little that one interpreter is
enough for them. It is another one than the head's, so that neither waits for the other's lock, and so that something is
left to clean up when the head's process is killed: the temporary directory of the whole demo belongs to this process,
which removes it and ends as soon as its input is closed, whatever it is doing.

It reads one JSON object a line from its standard input: first how large the cluster is, later where the head is. It
says one a line: where everything is, how much of the past is written, and when all of it is.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import logging
import os
import queue
import shutil
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpulse.cluster.agent.agent import AgentConfig, run_agent
from gpulse.cluster.agent.link import LinkConfig
from gpulse.cluster.agent.stamped import Stamped
from gpulse.cluster.demo.past import machine_id, simulated, write_past
from gpulse.cluster.demo.plan import ClusterPlan, NodePlan, cluster_plan
from gpulse.errors import DiskError, GpulseError

DIRECTORY_PREFIX = "gpulse-demo-"
_TIDY_SECONDS = 3.0
_SPREAD_SECONDS = 0.5
"""So that not all of them sample in the same moment."""
_MEMORY_FRAMES = 600
_SPOOL_BYTES = 16 << 20
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_NO_ROOM = "make room for some 100 MB there, or name another place: TMPDIR=/somewhere gpulse demo"


def remove(directory: str, seconds: float = _TIDY_SECONDS) -> None:
    """Remove a directory, again and again while somebody still writes there."""
    deadline = time.monotonic() + seconds
    while True:
        shutil.rmtree(directory, ignore_errors=True)
        if not os.path.exists(directory) or time.monotonic() > deadline:
            return
        time.sleep(0.02)


def _requests(directory: str) -> queue.SimpleQueue[dict[str, Any]]:
    """Lines of the input, read by a thread that cleans up and ends the process when there will be no more."""
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            requests.put(json.loads(line))
        remove(directory)
        os._exit(0)

    threading.Thread(target=read, name="gpulse-demo-input", daemon=True).start()
    return requests


def _say(**document: Any) -> None:
    with suppress(OSError):  # nobody listens any more: the end of the input tells what to do
        sys.stdout.write(json.dumps(document) + "\n")
        sys.stdout.flush()


def _identified(node: NodePlan, state: Path) -> Path:
    """The file that says which machine a node is: the one of its past."""
    state.mkdir(parents=True)
    path = state / "machine"
    path.write_text(machine_id(node), encoding="ascii")
    return path


async def _play(node: NodePlan, plan: ClusterPlan, started: float, link: LinkConfig, state: Path) -> None:
    """Be the agent of one node, for as long as it is planned to be there."""
    await asyncio.sleep(_SPREAD_SECONDS * (node.number - 1) / len(plan.nodes))
    config = AgentConfig(
        link=link,
        state=state,
        node_name=node.name,
        machine_file=_identified(node, state),
        labels=node.labels,
        spool_limit_bytes=_SPOOL_BYTES,
        memory_frames=_MEMORY_FRAMES,
    )
    stop = asyncio.Event()
    if node.leaves is not None:
        asyncio.get_running_loop().call_later(node.leaves, stop.set)
    await run_agent(config, Stamped(simulated(node, started)), stop=stop)


async def _play_all(plan: ClusterPlan, started: float, link: LinkConfig, directory: str) -> None:
    await asyncio.gather(
        *(_play(node, plan, started, link, Path(directory, "agents", node.name)) for node in plan.nodes)
    )
    await asyncio.Event().wait()  # all of them may have left; the process stays until it is told


def _work(directory: str, requests: queue.SimpleQueue[dict[str, Any]]) -> None:
    wanted = requests.get()
    plan = cluster_plan(wanted["nodes"], wanted["gpus"])
    started = time.time()
    gc.disable()  # nothing of the past is garbage before it is written
    write_past(
        f"{directory}/data",
        plan,
        started,
        clock=time.time,
        progress=lambda done: _say(done=round(done, 3)),
    )
    gc.enable()
    gc.collect()
    gc.freeze()  # the recordings stay
    _say(ready=True)
    told = requests.get()
    asyncio.run(_play_all(plan, started, LinkConfig(told["head"], told["token"]), directory))


def main() -> int:
    """Simulate until the input ends."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is for the head's process, which then closes the input
    logging.disable(logging.CRITICAL)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        directory = tempfile.mkdtemp(prefix=DIRECTORY_PREFIX)
    except OSError as error:
        _say(error=f"no temporary directory can be made: {error.strerror}", hint="TMPDIR names another place")
        return 1
    requests = _requests(directory)
    _say(directory=directory)
    try:
        _work(directory, requests)
    except DiskError as error:
        _say(error=error.message, hint=_NO_ROOM)
    except GpulseError as error:
        _say(error=error.message, hint=error.hint)
    except OSError as error:
        _say(error=str(error), hint=_NO_ROOM if error.errno in _DISK_ERRORS else None)
    finally:
        remove(directory)
    return 1


if __name__ == "__main__":
    sys.exit(main())
