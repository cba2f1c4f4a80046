"""Every Python sample of README and docs runs as it is printed, on a machine as its page takes for granted.

The machine has GPUs (of the fake driver), a Dask cluster where the page has one, and a head where the page talks to one.
Names that a page leaves to its reader, such as `batches`, are listed in `_NAMES`; any other unknown name is an error.
"""

from __future__ import annotations

import ast
import builtins
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from gpulse import sources
from gpulse.integrations.dask.csv_files import write_files
from tests.integration.cluster import Process, cluster_in
from tests.integration.dask_machine import ROOT, dask_machine
from tests.newcomer.blocks import Block, list_documents, read_blocks
from tests.unit.dask_records import Plan, record

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SAMPLES = {
    document: blocks
    for document in list_documents(ROOT)
    if (
        blocks := [
            block
            for block in read_blocks(document, (ROOT / document).read_text(encoding="utf-8"))
            if block.language == "python" and not block.source
        ]
    )
}
_CLIENT = 'from distributed import Client\nclient = Client("tcp://scheduler:8786")'
_MONITOR = f"""{_CLIENT}
from gpulse.integrations.dask import Monitor
monitor = Monitor(client)
monitor.detach()
"""
_RECORDING = 'monitor.attach(tracking=["tasks", "total-mem", "mem-util", "compute-util"])\nmonitor.start()\n'
_NAMES = {
    "gpulse": "import gpulse",
    "Client": "from distributed import Client",
    "Monitor": "from gpulse.integrations.dask import Monitor",
    "monitor": _MONITOR,
    "batches": "batches = range(3)",
    "step": "def step(batch): pass",
    "torch": "from types import SimpleNamespace as _N\ntorch = _N(cuda=_N(synchronize=lambda: None))",
    "train": "def train(setting): return setting",
    "settings": "settings = [1, 2, 3]",
}
"""What a page leaves to its reader, and what the tests put there."""
_SMALLER = (("seconds=20", "seconds=1"), ("workers=[0, 8]", "workers=[0]"))
"""What is changed in samples, so that they take less time and fewer workers."""
_ENDLESS = "async for message in stream"
"""A sample with this is ended when it has printed something."""
_SCHEDULER = re.compile(r"tcp://[\w.-]+:8786")
_HEAD = re.compile(r"ws://localhost:8091")


class Machine(NamedTuple):
    """Where samples run."""

    directory: Path
    environment: dict[str, str]
    scheduler: str
    """Address of the Dask scheduler."""
    http_port: int
    """Of the head."""


@contextmanager
def machine_for(blocks: list[Block], directory: Path, library: Path) -> Iterator[Machine]:
    """A machine with two hot GPUs, and with what these samples talk to."""
    text = "".join(map(script, blocks))
    with ExitStack() as stack:
        dask = stack.enter_context(dask_machine(directory, library))
        dask.fake.gpu(0).temperature = 90
        if _SCHEDULER.search(text):
            dask.joined(dask.worker("w0", "--resources", "GPU=1"))
        http_port = 0
        if _HEAD.search(text):
            cluster = stack.enter_context(cluster_in(directory))
            head = cluster.head()
            cluster.agent("gpu-01", head.port).said("connected to")
            http_port = head.http_port
        if 'record("run.jsonl.gz"' not in text:
            shutil.copy(Path(sources.__path__[0], "demo", "disk_read.jsonl.gz"), directory / "run.jsonl.gz")
        yield Machine(directory, {**dask.environment, "MPLBACKEND": "agg"}, dask.address, http_port)


def script(block: Block) -> str:
    """Return a sample after the definitions of the names that it takes for granted."""
    missing = _free_names(ast.parse(block.text))
    assert missing <= set(_NAMES), f"{block.place}: nothing defines {missing - set(_NAMES)}"
    is_recording = "monitor" in missing and "monitor.attach" not in block.text
    given = [_NAMES[name] for name in _NAMES if name in missing]
    return "\n".join([*given, _RECORDING if is_recording else "", block.text])


def _free_names(tree: ast.AST) -> set[str]:
    """Return the names that a module uses and does not define anywhere."""
    used, defined = set(), set(dir(builtins))
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                defined.add(name)
            case ast.arg(arg=name):
                defined.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                defined |= {(alias.asname or alias.name).partition(".")[0] for alias in names}
            case _:
                pass
    return used - defined


def run(machine: Machine, block: Block) -> None:
    """Run a sample; it must end with 0."""
    text = _SCHEDULER.sub(machine.scheduler, script(block))
    text = _HEAD.sub(f"ws://localhost:{machine.http_port}", text)
    for large, small in _SMALLER:
        text = text.replace(large, small)
    if "to_csv" not in text:  # what it reads is the record of a cluster that has worked
        plans = (Plan(worker=worker) for worker in range(2))
        write_files(machine.directory / "metrics", {plan.worker: record(plan) for plan in plans})
    path = machine.directory / "sample.py"
    path.write_text(f"{text}\n", encoding="utf-8")
    process = Process(cwd=machine.directory, env=machine.environment, command=[sys.executable, str(path)])
    if _ENDLESS in block.text:
        process.said("{")
        process.end(signal.SIGKILL)
        return
    code = process.end(0, seconds=100)
    assert 0 == code, f"{block.place}:\n{process.text}"


@pytest.mark.parametrize("document", SAMPLES)
def test_samples_run(document: str, tmp_path: Path, nvml_library: Path) -> None:
    """One after the other, in one directory, as somebody would type them."""
    blocks = SAMPLES[document]

    with machine_for(blocks, tmp_path, nvml_library) as machine:
        for block in blocks:
            run(machine, block)


def test_every_name_is_needed() -> None:
    """A name that no sample takes for granted any more is removed from the list."""
    used = {
        name for blocks in SAMPLES.values() for block in blocks for name in _free_names(ast.parse(block.text))
    }

    assert [] == [name for name in _NAMES if name not in used]
