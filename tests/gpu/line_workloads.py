"""Programs with a known guilty line, on a machine with a GPU: does `gpulse why` name it, and what does that cost?

    PYTHONPATH=src python tests/gpu/line_workloads.py [--py-spy PATH] [--out DIR] [KIND...]

It runs each program, diagnoses it with `gpulse why`, and prints whether the line marked `# guilty: KIND` was named;
on healthy programs no line may be named. Then it measures how much the reading of stacks slows two jobs down, by
switching it on and off every few seconds.
"""
# ruff: noqa: D103  the names of the programs say what they do

from __future__ import annotations

import argparse
import json
import math
import mmap
import os
import random
import re
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WINDOW_SECONDS = 15.0
_READY_SECONDS = 90.0
_PERIOD_SECONDS = 1.5
_COUNTER = struct.Struct("<qd")
"""Number of steps so far, and when the last one ended, on the monotonic clock that all processes share."""

if __name__ == "__main__" and sys.argv[1:2] == ["program"]:
    import numpy as np
    import torch  # type: ignore[import-not-found,unused-ignore]
    import torch.distributed as dist  # type: ignore[import-not-found,unused-ignore]
    import torch.multiprocessing as mp  # type: ignore[import-not-found,unused-ignore]
    from torch.utils.data import DataLoader, Dataset  # type: ignore[import-not-found,unused-ignore]
else:
    Dataset = object

Program = Callable[[Callable[[], None]], None]
"""Takes the function to call after each step."""
PROGRAMS: dict[str, Program] = {}
HEALTHY: set[str] = set()


def program(function: Program) -> Program:
    """Register a program with a guilty line."""
    PROGRAMS[function.__name__] = function
    return function


def healthy(function: Program) -> Program:
    """Register a program in which nothing is wrong."""
    HEALTHY.add(function.__name__)
    return program(function)


def make_model(width: int = 2048, layers: int = 4) -> Any:
    """A network of some layers on the GPU."""
    made = (torch.nn.Linear(width, width, bias=False) for _ in range(layers))
    return torch.nn.Sequential(*made).cuda().bfloat16()


def make_step(rows: int = 4096, width: int = 2048, layers: int = 4) -> Callable[[], Any]:
    """A training step on data that is on the GPU already; it returns the loss."""
    model = make_model(width, layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    data = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)

    def step() -> Any:
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


class Texts(Dataset):  # type: ignore[misc]
    """A dataset that decodes each sample in Python."""

    def __init__(self, cost: int) -> None:
        self.cost = cost

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Any:
        values = [(index * n) % 251 for n in range(self.cost)]  # guilty: dataset_getitem
        return torch.tensor(values[:256], dtype=torch.float32)


class WorkerTexts(Texts):
    """The same for workers, with its own line."""

    def __getitem__(self, index: int) -> Any:
        values = [(index ^ n) % 251 for n in range(self.cost)]  # guilty: loader_workers
        return torch.tensor(values[:256], dtype=torch.float32)


class Cheap(Dataset):  # type: ignore[misc]
    """A dataset that costs nothing."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Any:
        return [index % 7] * (50 + index % 50)


@program
def dataset_getitem(done: Callable[[], None]) -> None:
    step = make_step()
    for batch in DataLoader(Texts(20_000), batch_size=32):
        batch.cuda()
        step()
        done()


@program
def loader_workers(done: Callable[[], None]) -> None:
    step = make_step()
    for batch in DataLoader(WorkerTexts(60_000), batch_size=32, num_workers=4, pin_memory=True):
        batch.cuda(non_blocking=True)
        step().item()
        done()


def extend(sample: list[int], length: int) -> list[int]:
    return [sample[n] if n < len(sample) else 0 for n in range(length)]  # guilty: collate


def pad(samples: list[list[int]]) -> Any:
    longest = max(map(len, samples))
    return torch.tensor([extend(sample, longest) for sample in samples])


@program
def collate(done: Callable[[], None]) -> None:
    step = make_step()
    for batch in DataLoader(Cheap(), batch_size=8192, collate_fn=pad):
        batch.cuda()
        step()
        done()


_PIECE = re.compile(r"[a-z]{1,3}|\d")


def tokenise(text: str) -> list[int]:
    return [hash(piece) % 50_000 for piece in _PIECE.findall(text)]  # guilty: tokenising


@program
def tokenising(done: Callable[[], None]) -> None:
    step = make_step()
    text = "the quick brown fox jumps over 13 lazy dogs " * 2000
    while True:
        tokens = tokenise(text)
        torch.tensor(tokens[:1000]).cuda()
        step()
        done()


@program
def item_in_loop(done: Callable[[], None]) -> None:
    step = make_step(256, 512, 2)
    scores = torch.rand(400, device="cuda")
    total = 0.0
    while True:
        step()
        for place in range(400):
            total += scores[place].item()  # guilty: item_in_loop
        done()


@program
def saving(done: Callable[[], None]) -> None:
    step = make_step()
    state = {f"layer{n}": torch.randn(64 * 2**20, device="cuda") for n in range(8)}
    with tempfile.TemporaryDirectory() as folder:
        while True:
            until = time.monotonic() + 2.0
            while time.monotonic() < until:
                step().item()
                done()
            torch.save(state, f"{folder}/checkpoint.pt")  # guilty: saving


@program
def compiled(done: Callable[[], None]) -> None:
    model = torch.compile(make_model(), backend="eager")
    data = torch.randn(4096, 2048, device="cuda", dtype=torch.bfloat16)

    def augment(step: int) -> list[float]:
        return [math.sin(step + n) for n in range(60_000)]  # guilty: compiled

    number = 0
    while True:
        augment(number)
        with torch.no_grad():
            model(data)
        number += 1
        done()


@program
def eager_small_kernels(done: Callable[[], None]) -> None:
    state = torch.zeros(64, device="cuda")
    inputs = torch.randn(2000, 64, device="cuda")

    def unroll(state: Any) -> Any:
        for row in inputs:
            state = torch.tanh(state * 0.9 + row * 0.1) + state.mean()  # guilty: eager_small_kernels
        return state

    while True:
        state = unroll(state)
        done()


def rank_main(rank: int, port: int) -> None:
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    dist.init_process_group("gloo", rank=rank, world_size=2)
    step = make_step(2048, 1024, 2)
    gradients = torch.randn(32 * 2**20)
    while True:
        step().item()
        dist.all_reduce(gradients)  # guilty: ddp_gloo


@program
def ddp_gloo(done: Callable[[], None]) -> None:
    done()
    mp.spawn(rank_main, args=(random.randrange(20_000, 40_000),), nprocs=2)


@program
def periodic_evaluation(done: Callable[[], None]) -> None:
    step = make_step()

    def distance(a: str, b: str) -> int:
        row = list(range(len(b) + 1))
        for i, x in enumerate(a, 1):
            last, row[0] = row[0], i
            for j, y in enumerate(b, 1):
                last, row[j] = row[j], min(row[j], row[j - 1], last) + (x != y)  # guilty: periodic_evaluation
        return row[-1]

    while True:
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            step().item()
            done()
        until = time.monotonic() + 1.6
        while time.monotonic() < until:
            distance("abcdefghij" * 20, "acegikmoqs" * 20)


@program
def numpy_augmentation(done: Callable[[], None]) -> None:
    step = make_step()
    generator = np.random.default_rng(0)
    images = generator.random((64, 224, 224, 3), dtype=np.float32)

    def augment(batch: Any) -> Any:
        noisy = batch + generator.normal(0.0, 0.1, batch.shape)  # guilty: numpy_augmentation
        return np.flip(noisy, 2).astype(np.float32)

    while True:
        torch.from_numpy(augment(images)).cuda()
        step()
        done()


@program
def logging_each_step(done: Callable[[], None]) -> None:
    step = make_step()
    history: dict[str, list[float]] = {f"weights/{n}": [0.5] * 800 for n in range(40)}
    with open(os.devnull, "w") as log:
        while True:
            loss = step()
            log.write(json.dumps(history, indent=1))  # guilty: logging_each_step
            loss.item()
            done()


@program
def subprocess_each_step(done: Callable[[], None]) -> None:
    step = make_step()
    while True:
        for _ in range(5):
            step().item()
        subprocess.run(["sleep", "0.2"], check=True)  # guilty: subprocess_each_step
        done()


class _SlowAnswers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        time.sleep(0.15)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"sample")

    def log_message(self, *_: object) -> None:
        pass


@program
def network_wait(done: Callable[[], None]) -> None:
    step = make_step()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _SlowAnswers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/"
    while True:
        for _ in range(5):
            step().item()
        urllib.request.urlopen(address).read()  # guilty: network_wait
        done()


@healthy
def healthy_training(done: Callable[[], None]) -> None:
    step = make_step(8192, 4096, 8)
    while True:
        step()
        done()


@healthy
def healthy_with_item(done: Callable[[], None]) -> None:
    step = make_step(16384, 4096, 8)
    total = 0.0
    while True:
        total += step().item()
        done()


@healthy
def healthy_loader(done: Callable[[], None]) -> None:
    step = make_step(8192, 4096, 8)
    for batch in DataLoader(WorkerTexts(300), batch_size=16, num_workers=2, pin_memory=True):
        batch.cuda(non_blocking=True)
        for _ in range(4):
            step()
        done()


@healthy
def healthy_graph(done: Callable[[], None]) -> None:
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    a @ a
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(10):
            a @ a
    while True:
        graph.replay()
        done()


@program
def slowdown_loader(done: Callable[[], None]) -> None:
    """Only for the measurement: workers on as many CPUs as there are."""
    step = make_step()
    workers = min(8, os.cpu_count() or 1)
    for batch in DataLoader(WorkerTexts(20_000), batch_size=32, num_workers=workers, pin_memory=True):
        batch.cuda(non_blocking=True)
        step().item()
        done()


def run_program(name: str, counter: str) -> None:
    """Run a program; say `ready` on standard output after its first steps, and count its steps in a file."""
    sys.stdin.readline()
    with open(counter, "r+b") as file:
        steps = mmap.mmap(file.fileno(), _COUNTER.size)
    seen = 0

    def done() -> None:
        nonlocal seen
        seen += 1
        _COUNTER.pack_into(steps, 0, seen, time.monotonic())
        if seen == 3 or name == "ddp_gloo":
            print("ready", flush=True)

    PROGRAMS[name](done)


class Running:
    """A program that was started ahead: it has loaded PyTorch and waits."""

    def __init__(self, name: str) -> None:
        self.name = name
        descriptor, self.counter = tempfile.mkstemp()
        os.write(descriptor, bytes(_COUNTER.size))
        os.close(descriptor)
        self.child = subprocess.Popen(
            [sys.executable, __file__, "program", name, self.counter],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )

    def go(self) -> bool:
        """Let it run until it is ready."""
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write("\n")
        self.child.stdin.flush()
        timer = threading.Timer(_READY_SECONDS, self.end)
        timer.start()
        is_ready = self.child.stdout.readline().strip() == "ready"
        timer.cancel()
        return is_ready

    def steps(self) -> tuple[int, float]:
        """Number of steps so far, and when the last one ended."""
        count, end = _COUNTER.unpack(Path(self.counter).read_bytes())
        return int(count), float(end)

    def end(self) -> None:
        """Kill it and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.child.pid, 9)
        self.child.wait()
        Path(self.counter).unlink(missing_ok=True)


def guilty_line(name: str) -> int | None:
    """Return the marked line of a program."""
    lines = Path(__file__).read_text().splitlines()
    return next((n for n, text in enumerate(lines, 1) if text.endswith(f"# guilty: {name}")), None)


def diagnose(pid: int, out: Path, name: str) -> dict[str, Any]:
    """Diagnose a program with `gpulse why`."""
    command = [sys.executable, "-m", "gpulse", "why", "--json", "--pid", str(pid)]
    done = subprocess.run(
        [*command, "--window", f"{WINDOW_SECONDS:g}"], stdout=subprocess.PIPE, check=False, timeout=120
    )
    (out / f"{name}.json").write_bytes(done.stdout)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def check(name: str, document: dict[str, Any]) -> tuple[bool, str]:
    """Return whether the answer is right, and what it was."""
    findings = [finding for finding in document["findings"] if "where" in finding or "where_note" in finding]
    ids = [finding["id"] for finding in document["findings"]]
    where = findings[0].get("where") if findings else None
    note = findings[0].get("where_note") if findings else None
    if name in HEALTHY:
        claimed = [finding for finding in document["findings"] if finding.get("where")]
        return not claimed, f"{ids} {document['verdict']}" + (f" claimed {where}" if claimed else "")
    if not where:
        return False, f"{ids} {note or document['verdict']}"
    first = where[0]
    text = f"{ids} {Path(first['file']).name}:{first['line']} {first['function']} {first['share']:.0%} of {first['stacks']} {first['doing'] or ''} {note or ''}"
    return first["line"] == guilty_line(name) and Path(first["file"]).name == Path(__file__).name, text


def started_ahead(names: list[str]) -> Iterator[Running]:
    """Yield the programs in order, each with the next one loading behind it."""
    waiting = Running(names[0])
    for following in [*names[1:], None]:
        current = waiting
        if following is not None:
            waiting = Running(following)
        yield current


def measure_slowdown(job: str, seconds: float, workers: int) -> str:
    """Switch the reading of stacks on and off, and compare the steps per second."""
    sys.path.insert(0, str(ROOT / "src"))
    from gpulse.model.python_stack import StackTarget  # noqa: PLC0415  only the measurement needs it
    from gpulse.sampling.stack_collector import StackCollector  # noqa: PLC0415  only the measurement needs it
    from gpulse.sources.python_stacks import StackReader, find_py_spy  # noqa: PLC0415  only the measurement needs it

    running = Running(job)
    if not running.go():
        running.end()
        return f"{job}: the program did not start"
    time.sleep(5.0)
    reader = StackReader(find_py_spy())
    collector = StackCollector(lambda pid: reader.read(pid, time.time))
    children = Path(f"/proc/{running.child.pid}/task/{running.child.pid}/children").read_text().split()
    targets = [
        StackTarget(running.child.pid, "main"),
        *(StackTarget(int(pid), "worker") for pid in children[:workers]),
    ]
    rates: dict[bool, list[float]] = {True: [], False: []}
    pairs: list[float] = []
    for _ in range(int(seconds / _PERIOD_SECONDS / 2)):
        order = random.sample([True, False], 2)
        for is_reading in order:
            collector.watch(targets if is_reading else ())
            time.sleep(0.3)
            before, begin = running.steps()
            time.sleep(_PERIOD_SECONDS)
            after, end = running.steps()
            rates[is_reading].append((after - before) / (end - begin))
        pairs.append(rates[True][-1] / rates[False][-1])
    collector.close()
    running.end()
    error = statistics.stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else math.nan
    share = collector.cpu_seconds / (len(pairs) * (_PERIOD_SECONDS + 0.3))
    return (
        f"{job}: {statistics.mean(rates[False]):.2f} steps/s without, {statistics.mean(rates[True]):.2f} with; "
        f"ratio {statistics.mean(pairs):.4f} ± {error:.4f} (median {statistics.median(pairs):.4f}) over {len(pairs)} pairs; "
        f"{collector.reads} reads, {collector.cpu_seconds / max(1, collector.reads) * 1e3:.1f} ms of CPU each, {share:.1%} of one CPU"
    )


def main() -> int:
    """Run the chosen programs, then measure the slowdown."""
    if sys.argv[1:2] == ["program"]:
        run_program(sys.argv[2], sys.argv[3])
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kinds", nargs="*")
    parser.add_argument("--py-spy", type=Path, help="the py-spy to use; default: that on PATH")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "/tmp")))
    parser.add_argument(
        "--slowdown", type=float, default=50.0, help="seconds for each of two jobs; 0 for none"
    )
    options = parser.parse_args()
    if options.py_spy is not None:
        os.environ["PATH"] = f"{options.py_spy.resolve().parent}:{os.environ['PATH']}"
    names = options.kinds or [name for name in PROGRAMS if name != "slowdown_loader"]
    right = 0
    for running in started_ahead(names):
        try:
            if running.go():
                time.sleep(1.0)
                is_right, text = check(running.name, diagnose(running.child.pid, options.out, running.name))
            else:
                is_right, text = False, "the program did not start"
        except (ValueError, subprocess.TimeoutExpired) as error:
            is_right, text = False, f"no answer: {error}"
        finally:
            running.end()
        right += is_right
        print(f"{'right' if is_right else 'WRONG'}  {running.name:22} {text}", flush=True)
    print(f"{right} of {len(names)} right", flush=True)
    if options.slowdown > 0:
        print(measure_slowdown("dataset_getitem", options.slowdown, 0), flush=True)
        print(measure_slowdown("slowdown_loader", options.slowdown, 8), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
