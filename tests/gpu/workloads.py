"""PyTorch programs whose bottleneck is induced on purpose, one a kind, to record and to diagnose.

    python tests/gpu/workloads.py loader_few4 --seconds 25
    WORKLOAD_KIND=loader_few4 python tests/gpu/workloads.py     # the command line says nothing
    python tests/gpu/workloads.py --list
    python tests/gpu/workloads.py --smoke                       # every kind for a moment, in one process

Each prints `begin EPOCH` when its steady state starts, `mark EPOCH WHAT` for what happens in it, and
`end EPOCH steps N`. How much is lost is set from the measured time of a GPU step, so that a kind means the
same on another GPU. `WORKLOAD_DEVICE=cpu` runs tiny sizes without a GPU, to find mistakes.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import mmap
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch  # type: ignore[import-not-found,unused-ignore]
import torch.nn.functional as F  # type: ignore[import-not-found,unused-ignore]  # noqa: N812
from torch import nn  # type: ignore[import-not-found,unused-ignore]

DEVICE = os.environ.get("WORKLOAD_DEVICE", "cuda")
TINY = DEVICE == "cpu"
DATA = os.environ.get("WORKLOAD_DATA", os.path.join(tempfile.gettempdir(), "workload.bin"))
DATA_BYTES = (64 if TINY else 3072) << 20
SCRATCH = os.path.join(tempfile.gettempdir(), "workload.ckpt")
GIB = 1 << 30
MIB = 1 << 20
CPUS = len(os.sched_getaffinity(0))
WARM = 1.0
"""Scales the time of warming up."""

Step = Callable[..., Any]


class Kind(NamedTuple):
    """One program: what it does, and what a diagnosis of it should say."""

    name: str
    function: Callable[[Run], None]
    expect: tuple[str, ...]
    also_right: tuple[str, ...]
    info: tuple[str, ...]
    seconds: float
    processes: int
    hogs: int
    """Spinning processes beside it, not its children."""
    hogs_after: float
    """Seconds after `begin`."""
    note: str


KINDS: dict[str, Kind] = {}


def kind(
    *expect: str,
    also: tuple[str, ...] = (),
    info: tuple[str, ...] = (),
    seconds: float = 12.0,
    processes: int = 1,
    hogs: int = 0,
    hogs_after: float = 0.0,
) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Register a program under its own name."""

    def register(function: Callable[[Run], None]) -> Callable[[Run], None]:
        name = function.__name__
        note = " ".join((function.__doc__ or "").split())
        KINDS[name] = Kind(name, function, expect, also, info, seconds, processes, hogs, hogs_after, note)
        return function

    return register


class Run:
    """The clock and the log of one program."""

    def __init__(self, seconds: float, role: int = 0) -> None:
        self.seconds = seconds
        self.role = role
        self.steps = 0
        self.began = 0.0

    def begin(self) -> None:
        """The steady state starts now."""
        sync()
        self.began = time.time()
        self._say(f"begin {self.began:.3f}")

    def going(self) -> bool:
        """Whether there is time left."""
        return time.time() - self.began < self.seconds

    @property
    def elapsed(self) -> float:
        """Seconds since the steady state began."""
        return time.time() - self.began

    def mark(self, what: str) -> None:
        """Something happens now."""
        self._say(f"mark {time.time():.3f} {what}")

    def tell(self, **facts: float) -> None:
        """Numbers for whoever reads the log."""
        self._say("fact " + " ".join(f"{name}={value:.5g}" for name, value in facts.items()))

    def end(self) -> None:
        """It is over."""
        self._say(f"end {time.time():.3f} steps {self.steps}")

    def _say(self, line: str) -> None:
        if self.role == 0:
            print(line, flush=True)


# ---------------------------------------------------------------------------------------------------------
# Models


def sync() -> None:
    """Wait for the GPU."""
    if not TINY:
        torch.cuda.synchronize()


def tiny(size: int, small: int) -> int:
    """A size, or a small one where there is no GPU."""
    return small if TINY else size


class Block(nn.Module):  # type: ignore[misc,unused-ignore]
    """A transformer block, with an optional cache of keys and values."""

    def __init__(self, dim: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Any, cache: Any = None) -> Any:
        """One pass; with a cache, x is one new token whose keys go to the last place."""
        batch, length, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, dim // self.heads).unbind(2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if cache is not None:
            cache[0][:, :, -1:].copy_(k)
            cache[1][:, :, -1:].copy_(v)
            k, v = cache[0], cache[1]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal and cache is None)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):  # type: ignore[misc,unused-ignore]
    """A decoder."""

    def __init__(self, dim: int, layers: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, causal=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: Any, caches: Any = None) -> Any:
        """Logits."""
        x = self.embed(tokens)
        for place, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[place])
        return self.head(self.norm(x))


class Vit(nn.Module):  # type: ignore[misc,unused-ignore]
    """An image classifier of transformer blocks."""

    def __init__(self, dim: int, layers: int, heads: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 16, 16)
        self.blocks = nn.Sequential(*(Block(dim, heads, causal=False) for _ in range(layers)))
        self.head = nn.Linear(dim, 1000)

    def forward(self, images: Any) -> Any:
        """Logits."""
        return self.head(self.blocks(self.patch(images).flatten(2).transpose(1, 2)).mean(1))


class Residual(nn.Module):  # type: ignore[misc,unused-ignore]
    """A bottleneck of a residual network."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        middle = outside // 4
        self.body = nn.Sequential(
            nn.Conv2d(inside, middle, 1, bias=False), nn.BatchNorm2d(middle), nn.ReLU(),
            nn.Conv2d(middle, middle, 3, stride, 1, bias=False), nn.BatchNorm2d(middle), nn.ReLU(),
            nn.Conv2d(middle, outside, 1, bias=False), nn.BatchNorm2d(outside),
        )  # fmt: skip
        self.skip = nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: Any) -> Any:
        """One pass."""
        return F.relu(self.body(x) + self.skip(x))


def cnn(width: int, depth: int) -> nn.Module:
    """A residual network of four stages."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(2)]
    inside = width
    for stage in range(4):
        outside = width * 4 * 2**stage
        for place in range(depth):
            layers.append(Residual(inside, outside, 2 if place == 0 and stage else 1))
            inside = outside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, 1000))


def mlp(dim: int, layers: int) -> nn.Module:
    """Linear layers."""
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(dim, dim), nn.GELU())))


class Training:
    """A model with its optimiser and a batch that stays on the GPU."""

    def __init__(
        self, make: Callable[[], Any], batch: Callable[[], Any], *, half: bool = True, **options: Any
    ) -> None:
        with torch.device(DEVICE):
            self.model = make()
            self.batch = batch()
        self.half = half
        if self.batch.dim() == 4:
            self.model = self.model.to(memory_format=torch.channels_last)
        options.setdefault("fused", not TINY)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, **options)

    def forward(self, x: Any) -> Any:
        """The loss."""
        with torch.autocast(DEVICE, torch.bfloat16, enabled=self.half):
            if x.dim() == 4:
                x = x.float().div_(255).contiguous(memory_format=torch.channels_last)
            y = self.model(x)
            if x.dtype == torch.long:
                return F.cross_entropy(y.flatten(0, 1), x.flatten())
            return y.float().square().mean()

    def step(self, x: Any = None) -> Any:
        """One training step, launched and not waited for."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.forward(self.batch if x is None else x)
        loss.backward()
        self.optimizer.step()
        return loss


def gpt(
    dim: int, layers: int, batch: int, length: int, *, half: bool = True, vocabulary: int = 16000
) -> Training:
    """Training of a decoder."""
    dim, layers, batch, length = tiny(dim, 64), tiny(layers, 1), tiny(batch, 1), tiny(length, 16)
    words = tiny(vocabulary, 100)
    return Training(
        lambda: Gpt(dim, layers, max(1, dim // 64), words),
        lambda: torch.randint(0, words, (batch, length)),
        half=half,
    )


def images(width: int, depth: int, batch: int, side: int, *, half: bool = True) -> Training:
    """Training of a residual network."""
    width, depth, batch, side = tiny(width, 8), tiny(depth, 1), tiny(batch, 2), tiny(side, 32)
    return Training(
        lambda: cnn(width, depth),
        lambda: torch.randint(0, 255, (batch, 3, side, side), dtype=torch.uint8),
        half=half,
    )


def patches(dim: int, layers: int, batch: int) -> Training:
    """Training of a vision transformer."""
    dim, layers, batch, side = tiny(dim, 64), tiny(layers, 1), tiny(batch, 2), tiny(224, 32)
    return Training(
        lambda: Vit(dim, layers, dim // 64),
        lambda: torch.randint(0, 255, (batch, 3, side, side), dtype=torch.uint8),
    )


def dense(dim: int, layers: int, batch: int, *, half: bool = True) -> Training:
    """Training of linear layers."""
    dim, layers, batch = tiny(dim, 32), tiny(layers, 2), tiny(batch, 8)
    return Training(lambda: mlp(dim, layers), lambda: torch.randn(batch, dim), half=half)


# The GPU's part of a step must be longer than the time that launching it takes: where it is not, a program
# loses time by itself, and whatever is induced beside it explains only a part of the loss.


def warm(step: Step, seconds: float = 0.6, least: int = 4) -> float:
    """Run until it is warm; seconds a step."""
    end = time.time() + (0.02 if TINY else seconds) * WARM
    done = 0
    while done < least or time.time() < end:
        step()
        sync()
        done += 1
    began = time.perf_counter()
    count = max(2, done // 4)
    for _ in range(count):
        step()
    sync()
    return (time.perf_counter() - began) / count


def repeated(step: Step, seconds: float) -> tuple[Step, float]:
    """As many steps in one as fill about this time, and how long they take."""
    each = warm(step)
    count = 1 if TINY else max(1, round(seconds / each))

    def steps() -> None:
        for _ in range(count):
            step()

    return steps, each * count


# ---------------------------------------------------------------------------------------------------------
# What holds a program up


def burn(seconds: float) -> int:
    """Use CPU time of this thread, in Python."""
    end = time.thread_time() + seconds
    total = 0
    while time.thread_time() < end:
        for number in range(400):
            total += number * number % 7
    return total


def augment(seconds: float) -> Any:
    """Use CPU time of this thread as transforms of images do."""
    end = time.thread_time() + seconds
    picture = torch.rand(3, 96, 96)
    while time.thread_time() < end:
        larger = F.interpolate(picture[None], scale_factor=1.5, mode="bilinear")[0]
        picture = larger.flip(-1)[:, 20:116, 20:116].mul(1.01).clamp_(0, 1)
    return picture


def make_file() -> None:
    """A file of random bytes that is on the disk."""
    if os.path.exists(DATA) and os.path.getsize(DATA) >= DATA_BYTES:
        return
    block = os.urandom(16 * MIB)
    with open(DATA, "wb") as file:
        file.writelines(block for _ in range(DATA_BYTES // len(block)))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Reader:
    """Reads the file from the disk, past the page cache or after dropping it."""

    def __init__(self, chunk: int, *, direct: bool, random: bool, seed: int = 0) -> None:
        self.chunk, self.direct, self.random = chunk, direct, random
        self.buffer = mmap.mmap(-1, chunk)
        self.fd = os.open(DATA, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        self.places = DATA_BYTES // chunk
        self.place = seed * 7919 % self.places

    def read(self, size: float) -> None:
        """So many bytes, in chunks."""
        for _ in range(max(1, round(size / self.chunk))):
            self.place = (self.place * 1103515245 + 12345 if self.random else self.place + 1) % self.places
            offset = self.place * self.chunk
            if not self.direct:
                os.posix_fadvise(self.fd, offset, self.chunk, os.POSIX_FADV_DONTNEED)
            os.preadv(self.fd, [self.buffer], offset)

    def rate(self, seconds: float = 0.3) -> float:
        """Bytes a second that one reader gets."""
        began = time.perf_counter()
        done = 0
        while time.perf_counter() - began < seconds:
            self.read(4 * self.chunk)
            done += 4 * self.chunk
        return done / (time.perf_counter() - began)


class Feed(torch.utils.data.IterableDataset):  # type: ignore[misc,name-defined,unused-ignore]
    """Endless batches, each made at a cost."""

    def __init__(
        self, template: Any, *, cpu: float = 0.0, python: bool = False, sleep: float = 0.0,
        read: float = 0.0, reader: tuple[int, bool, bool] = (MIB, True, False), threads: int = 0, keep: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.template, self.cpu, self.python, self.sleep = template, cpu, python, sleep
        self.bytes, self.reader, self.threads, self.keep = read, reader, threads, keep

    def __iter__(self) -> Iterator[Any]:
        """Batches."""
        info = torch.utils.data.get_worker_info()
        chunk, direct, random = self.reader
        seed = info.id + 1 if info else 0
        reader = Reader(chunk, direct=direct, random=random, seed=seed) if self.bytes else None
        kept = []
        if self.threads:
            torch.set_num_threads(self.threads)
            field = torch.rand(600_000)
        while True:
            if reader:
                reader.read(self.bytes)
            if self.sleep:
                time.sleep(self.sleep)
            if self.threads:
                for _ in range(300):
                    field = torch.exp(field).clamp_(0, 1)
            elif self.cpu:
                (burn if self.python else augment)(self.cpu)
            if self.keep:
                kept.append(bytearray(os.urandom(4096) * (self.keep // 4096)))
            yield self.template.clone()


def fed(
    run: Run,
    training: Training,
    workers: int,
    *,
    pin: bool = False,
    depth: int = 2,
    warm_up: float = 1.0,
    **cost: Any,
) -> None:
    """Train on what a loader gives."""
    feed = Feed(training.batch.cpu(), **cost)
    loader = torch.utils.data.DataLoader(
        feed, batch_size=None, num_workers=workers, pin_memory=pin and not TINY,
        prefetch_factor=depth if workers else None,
    )  # fmt: skip
    batches = iter(loader)
    end = time.time() + (0.05 if TINY else min(warm_up, run.seconds))
    training.step(next(batches).to(DEVICE))
    while time.time() < end:
        training.step(next(batches).to(DEVICE, non_blocking=pin))
        sync()
    run.begin()
    while run.going():
        training.step(next(batches).to(DEVICE, non_blocking=pin)).item()
        run.steps += 1
    del batches


def alone(run: Run, step: Step, *, every: int = 1) -> None:
    """Repeat a step, waiting for the GPU every so often."""
    run.begin()
    while run.going():
        step()
        run.steps += 1
        if run.steps % every == 0:
            sync()


# ---------------------------------------------------------------------------------------------------------
# Input


def _starved(
    run: Run, training: Training, workers: int, duty: float, *, effective: float = 0.0, **cost: Any
) -> None:
    each = warm(training.step)
    seconds = (effective or workers) * each / duty
    run.tell(gpu_step=each, cpu_per_batch=seconds)
    fed(run, training, workers, cpu=seconds, **cost)


@kind("input_too_few_workers")
def loader_few4(run: Run) -> None:
    """4 pegged workers, GPU wanted 40 % of the time."""
    _starved(run, patches(768, 8, 96), 4, 0.40)


@kind("input_too_few_workers")
def loader_few3_mild(run: Run) -> None:
    """3 pegged workers, GPU wanted 78 % of the time, page-locked batches."""
    _starved(run, images(64, 3, 256, 160), 3, 0.78, pin=True)


@kind("input_too_few_workers", also=("host_single_thread",))
def loader_one(run: Run) -> None:
    """1 pegged worker, GPU wanted 25 % of the time, Python code."""
    _starved(run, gpt(768, 8, 16, 1024), 1, 0.25, python=True)


@kind("input_cpu_bound", also=("cpu_oversubscribed",))
def loader_all16(run: Run) -> None:
    """16 pegged workers on 16 cores, GPU wanted half of the time."""
    _starved(run, images(64, 3, 384, 128), CPUS, 0.50, effective=CPUS - 1)


@kind("input_cpu_bound", also=("cpu_oversubscribed",))
def loader_all24(run: Run) -> None:
    """24 pegged workers on 16 cores, GPU wanted 60 % of the time."""
    _starved(run, patches(512, 8, 128), CPUS * 3 // 2, 0.60, effective=CPUS - 1)


@kind("input_main_process", also=("host_single_thread", "input_too_few_workers"))
def loader_main(run: Run) -> None:
    """num_workers=0, transforms of images, GPU wanted 55 % of the time."""
    training = images(64, 3, 192, 160)
    each = warm(training.step)
    torch.set_num_threads(1)
    fed(run, training, 0, cpu=each * 0.45 / 0.55)


@kind("input_main_process", also=("host_many_threads",))
def loader_main_threads(run: Run) -> None:
    """num_workers=0, transforms on all cores, GPU wanted less than half of the time."""
    training = images(64, 3, 192, 160)
    warm(training.step)
    fed(run, training, 0, threads=CPUS)


@kind("host_single_thread", also=("input_too_few_workers",))
def loader_main_heavy(run: Run) -> None:
    """num_workers=0, Python tokenising, GPU wanted 20 % of the time."""
    training = gpt(768, 6, 16, 1024)
    each = warm(training.step)
    fed(run, training, 0, cpu=each * 0.8 / 0.2, python=True)


@kind("input_io_bound")
def disk_workers(run: Run) -> None:
    """4 workers read large pieces past the page cache."""
    make_file()
    training = patches(768, 6, 64)
    each = warm(training.step)
    rate = Reader(4 * MIB, direct=True, random=True).rate()
    total = min(4 * rate, max(rate, 3e9))
    run.tell(gpu_step=each, read_rate=rate)
    fed(run, training, 4, read=total * each / 0.45, reader=(4 * MIB, True, True))


@kind("input_io_bound")
def disk_main(run: Run) -> None:
    """The main process reads files whose cache was dropped; GPU wanted 45 % of the time."""
    make_file()
    training = images(64, 3, 192, 160)
    each = warm(training.step)
    rate = Reader(MIB, direct=False, random=True).rate()
    run.tell(gpu_step=each, read_rate=rate)
    fed(run, training, 0, read=rate * each * 0.55 / 0.45, reader=(MIB, False, True))


@kind("input_io_bound")
def disk_small(run: Run) -> None:
    """3 workers read 8 KiB at random past the page cache, one at a time."""
    make_file()
    training = gpt(768, 6, 16, 1024)
    each = warm(training.step)
    rate = Reader(8192, direct=True, random=True).rate()
    run.tell(gpu_step=each, read_rate=rate)
    fed(run, training, 3, read=3 * rate * each / 0.35, reader=(8192, True, True))


@kind("input_io_bound")
def disk_cold_cache(run: Run) -> None:
    """2 workers read 256 KiB at random through a dropped page cache, with some CPU work; GPU wanted 60 %."""
    make_file()
    training = images(64, 3, 256, 160)
    each = warm(training.step)
    rate = Reader(256 * 1024, direct=False, random=True).rate()
    run.tell(gpu_step=each, read_rate=rate)
    period = 2 * each / 0.60
    fed(run, training, 2, read=rate * period * 0.85, reader=(256 * 1024, False, True), cpu=period * 0.15)


@kind("host_wait_unattributed", also=("gpu_underused",))
def service_workers(run: Run) -> None:
    """3 workers wait for a remote store; GPU wanted 30 % of the time."""
    training = patches(768, 6, 64)
    each = warm(training.step)
    fed(run, training, 3, sleep=3 * each / 0.30)


@kind("host_wait_unattributed")
def service_mild(run: Run) -> None:
    """8 workers wait for a remote store, with a little CPU work; GPU wanted 75 % of the time."""
    training = images(64, 3, 256, 160)
    each = warm(training.step)
    fed(run, training, 8, sleep=8 * each / 0.75 * 0.85, cpu=8 * each / 0.75 * 0.15)


@kind("host_wait_unattributed", also=("gpu_underused",))
def service_main(run: Run) -> None:
    """The main process waits for a remote service in each step; GPU wanted 45 % of the time."""
    training = gpt(1024, 8, 16, 1024)
    each = warm(training.step)
    fed(run, training, 0, sleep=each * 0.55 / 0.45)


# ---------------------------------------------------------------------------------------------------------
# Launches and the program's own thread


@kind("launch_bound", also=("host_single_thread",))
def launch_mlp(run: Run) -> None:
    """Eager training of 40 tiny layers, the optimiser tensor by tensor."""
    training = Training(
        lambda: mlp(128, 40), lambda: torch.randn(64, 128), half=False, fused=False, foreach=False
    )
    warm(training.step)
    alone(run, training.step, every=5)


@kind("launch_bound", also=("host_single_thread", "thin_kernels"))
def launch_amp_gpt(run: Run) -> None:
    """Eager autocast training of a small decoder at batch 1, loss read at each step."""
    training = gpt(384, 8, 1, 128)
    warm(training.step)
    alone(run, lambda: training.step().item())


@kind("launch_bound", also=("host_single_thread", "thin_kernels"))
def decode_eager(run: Run) -> None:
    """Eager batch-1 decode with a cache."""
    step = _decoder(tiny(1024, 64), tiny(16, 1), 1, 512)
    with torch.no_grad():
        warm(step)
        alone(run, step)


@kind("launch_bound", also=("host_single_thread",))
def item_every_op(run: Run) -> None:
    """A value is read back after every small operation."""
    x = torch.ones(tiny(512, 8), tiny(512, 8), device=DEVICE)
    w = torch.eye(tiny(512, 8), device=DEVICE)

    def step() -> None:
        nonlocal x
        for _ in range(10):
            x = torch.tanh(x @ w)
            x.sum().item()

    warm(step)
    alone(run, step)


@kind("launch_bound", also=("host_single_thread", "thin_kernels"))
def lstm_cells(run: Run) -> None:
    """A recurrent cell stepped in Python, forward and backward."""
    cell = nn.LSTMCell(256, 256, device=DEVICE)
    x = torch.randn(64, 32, 256, device=DEVICE)

    def step() -> None:
        h = c = torch.zeros(32, 256, device=DEVICE)
        for place in range(64):
            h, c = cell(x[place], (h, c))
        h.sum().backward()

    warm(step)
    alone(run, step)


@kind("thin_kernels", also=("launch_bound", "host_single_thread"))
def lstm_cudnn(run: Run) -> None:
    """A small fused recurrent network over long sequences."""
    net = nn.LSTM(256, 256, 2, device=DEVICE)
    x = torch.randn(tiny(512, 8), 16, 256, device=DEVICE)

    def step() -> None:
        net(x)[0].sum().backward()

    warm(step)
    alone(run, step)


def _python_step(run: Run, step: Step, gpu_seconds: float, lost: float) -> None:
    steps, each = repeated(step, gpu_seconds)
    seconds = each * lost / (1 - lost)
    run.tell(gpu_step=each, python=seconds)

    def both() -> None:
        steps()
        sync()
        burn(seconds)

    alone(run, both)


@kind("host_single_thread")
def python_15(run: Run) -> None:
    """Python between steps, 16 % of the time."""
    _python_step(run, gpt(1536, 6, 8, 512).step, 0.04, 0.16)


@kind("host_single_thread")
def python_30(run: Run) -> None:
    """Python between steps, 30 % of the time."""
    _python_step(run, images(64, 3, 320, 160).step, 0.08, 0.30)


@kind("host_single_thread")
def python_60(run: Run) -> None:
    """Python between steps, 60 % of the time, long steps."""
    _python_step(run, dense(4096, 8, 8192).step, 0.25, 0.60)


@kind("host_single_thread", also=("launch_bound",))
def python_fine_grained(run: Run) -> None:
    """Python around each of many forward passes of a policy, half of the time (like reinforcement learning)."""
    net = mlp(tiny(2048, 16), 6).to(DEVICE)
    x = torch.randn(tiny(1024, 4), tiny(2048, 16), device=DEVICE)

    def step() -> None:
        with torch.no_grad():
            net(x).argmax(-1).cpu()

    each = warm(step)

    def both() -> None:
        step()
        burn(each)

    alone(run, both)


# ---------------------------------------------------------------------------------------------------------
# Copies


def _copying(run: Run, step: Step, gpu_seconds: float, copy: Step) -> None:
    steps, each = repeated(step, gpu_seconds)
    for _ in range(2):
        copy()
    began = time.perf_counter()
    copy()
    sync()
    run.tell(gpu_step=each, copy=time.perf_counter() - began)

    def both() -> None:
        copy()
        steps()
        sync()

    alone(run, both)


@kind("pcie_copy_bound")
def pageable_256m(run: Run) -> None:
    """256 MB of pageable memory a step beside 60 ms of compute."""
    data = torch.ones(tiny(64, 1) * MIB)
    _copying(run, gpt(1024, 8, 16, 1024).step, 0.06, lambda: data.to(DEVICE))


@kind("pcie_copy_bound")
def pageable_1g(run: Run) -> None:
    """1 GB of pageable memory a step beside 50 ms of compute."""
    data = torch.ones(tiny(256, 1) * MIB)
    _copying(run, patches(768, 6, 64).step, 0.05, lambda: data.to(DEVICE))


@kind("pcie_copy_bound", also=("host_single_thread", "input_main_process", "host_many_threads"))
def pageable_fresh(run: Run) -> None:
    """384 MB of fresh pageable memory a step (first touched, then copied) beside 40 ms of compute."""
    _copying(run, images(64, 3, 192, 160).step, 0.04, lambda: torch.ones(tiny(96, 1) * MIB).to(DEVICE))


@kind("pcie_copy_bound")
def offload_layers(run: Run) -> None:
    """Layers stream in from pinned memory in turns with their compute."""
    layers = [_pinned(tiny(64, 1) * MIB) for _ in range(4)]
    slot = torch.empty(tiny(64, 1) * MIB, device=DEVICE)
    side = tiny(8192, 1024)
    x = torch.randn(tiny(768, 8), side, device=DEVICE).bfloat16()

    def step() -> None:
        with torch.no_grad():
            for layer in layers:
                slot.copy_(layer, non_blocking=True)
                weight = slot[: side * side].view(side, side).bfloat16()
                for _ in range(6):
                    torch.tanh(x @ weight)

    warm(step)
    alone(run, step)


@kind("pcie_copy_bound")
def offload_mild(run: Run) -> None:
    """512 MB of pinned memory a step in turns with 30 ms of compute: a quarter of the time."""
    data = _pinned(tiny(128, 1) * MIB)
    _copying(run, gpt(1024, 8, 16, 1024).step, 0.03, lambda: data.to(DEVICE, non_blocking=True))


@kind("pcie_copy_bound", also=("host_single_thread",))
def back_to_host(run: Run) -> None:
    """Activations go to fresh host memory each step: 200 MB beside 40 ms of compute."""
    data = torch.ones(tiny(50, 1) * MIB, device=DEVICE)
    _copying(run, patches(768, 6, 64).step, 0.04, data.cpu)


@kind("pcie_copy_bound")
def back_to_host_pinned(run: Run) -> None:
    """1 GB goes to pinned host memory each step beside 20 ms of compute."""
    data = torch.ones(tiny(256, 1) * MIB, device=DEVICE)
    target = _pinned(tiny(256, 1) * MIB)
    _copying(run, images(64, 3, 192, 160).step, 0.02, lambda: target.copy_(data, non_blocking=True))


def _pinned(count: int) -> Any:
    return torch.ones(count) if TINY else torch.ones(count).pin_memory()


# ---------------------------------------------------------------------------------------------------------
# What the kernels use


def _without_tf32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@kind("tensor_cores_unused")
def fp32_gpt(run: Run) -> None:
    """fp32 training of a decoder without TF32."""
    _without_tf32()
    training = gpt(1024, 6, 8, 512, half=False)
    warm(training.step)
    alone(run, training.step)


@kind("tensor_cores_unused")
def fp32_mlp(run: Run) -> None:
    """fp32 training of linear layers without TF32."""
    _without_tf32()
    training = dense(3072, 10, 4096, half=False)
    warm(training.step)
    alone(run, training.step, every=4)


@kind("tensor_cores_unused")
def fp32_cnn(run: Run) -> None:
    """fp32 training of a residual network without TF32."""
    _without_tf32()
    training = images(64, 3, 192, 160, half=False)
    warm(training.step)
    alone(run, training.step)


def _graphed(step: Step) -> Step:
    if TINY:
        return step
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    replay: Step = graph.replay
    return replay


@kind("thin_kernels")
def thin_graph(run: Run) -> None:
    """A graph of 400 matrix products of 256 by 256, one after the other."""
    x = torch.randn(256, 256, device=DEVICE).bfloat16()
    w = (torch.randn(256, 256, device=DEVICE) / 16).bfloat16()

    def chain() -> None:
        y = x
        for _ in range(tiny(200, 2)):
            y = torch.tanh(y @ w)

    replay = _graphed(chain)

    def step() -> None:
        for _ in range(20):
            replay()

    warm(step)
    alone(run, step)


def _decoder(dim: int, layers: int, batch: int, length: int) -> Step:
    with torch.device(DEVICE):
        net = Gpt(dim, layers, dim // 64, 2000).bfloat16().eval()
        tokens = torch.zeros(batch, 1, dtype=torch.long)
        caches = [
            [torch.zeros(batch, dim // 64, length, 64, dtype=torch.bfloat16) for _ in range(2)]
            for _ in range(layers)
        ]

    def step() -> None:
        tokens.copy_(net(tokens, caches).argmax(-1))

    return step


@kind("thin_kernels")
def thin_decode(run: Run) -> None:
    """Decode of a small model at batch 4 in a CUDA graph, token by token."""
    with torch.no_grad():
        replay = _graphed(_decoder(tiny(512, 64), tiny(12, 1), 4, 256))

        def step() -> None:
            for _ in range(32):
                replay()

        warm(step)
        alone(run, step)


@kind("thin_kernels")
def thin_scan(run: Run) -> None:
    """Kernels of a few blocks each: sums over short rows, queued far ahead."""
    x = torch.randn(8, tiny(4_000_000, 100), device=DEVICE)

    def step() -> None:
        for _ in range(10):
            torch.cumsum(x, 1)

    warm(step)
    alone(run, step)


@kind(info=("memory_bandwidth_bound",))
def bandwidth_elementwise(run: Run) -> None:
    """Element-wise operations over 3 GB in half precision."""
    x = torch.ones(tiny(1536, 1) * MIB, device=DEVICE, dtype=torch.bfloat16)

    def step() -> None:
        x.mul_(1.0001)
        x.add_(0.001)

    warm(step)
    alone(run, step, every=8)


@kind(info=("memory_bandwidth_bound",))
def bandwidth_norm(run: Run) -> None:
    """Layer norms over a large tensor, forward and backward."""
    norm = nn.LayerNorm(1024, device=DEVICE)
    x = torch.randn(tiny(262144, 16), 1024, device=DEVICE, requires_grad=True)

    def step() -> None:
        norm(x).sum().backward()

    warm(step)
    alone(run, step, every=2)


# ---------------------------------------------------------------------------------------------------------
# Healthy


@kind(info=("compute_bound",))
def healthy_gpt(run: Run) -> None:
    """bf16 training of a decoder, loss read at each step."""
    training = gpt(1536, 10, 16, 1024)
    warm(training.step)
    alone(run, lambda: training.step().item())


@kind()
def healthy_cnn_loader(run: Run) -> None:
    """bf16 residual network, 8 workers that keep up at 60 % each."""
    training = images(96, 3, 256, 192)
    each = warm(training.step)
    fed(run, training, 8, pin=True, cpu=8 * each * 0.6, depth=4)


@kind()
def healthy_vit(run: Run) -> None:
    """bf16 vision transformer, 14 workers that keep up at 80 % each."""
    training = patches(1024, 10, 160)
    each = warm(training.step)
    fed(run, training, max(1, CPUS - 2), pin=True, cpu=(CPUS - 2) * each * 0.8, depth=3)


@kind()
def healthy_gemm(run: Run) -> None:
    """Large matrix products, queued far ahead."""
    a = torch.randn(tiny(12288, 64), tiny(8192, 64), device=DEVICE).bfloat16()
    b = torch.randn(tiny(8192, 64), tiny(8192, 64), device=DEVICE).bfloat16()
    step = lambda: a @ b  # noqa: E731
    warm(step)
    alone(run, step, every=50)


@kind()
def healthy_prefetch(run: Run) -> None:
    """Batches cross the link on a second stream for a fifth of each step, hidden behind compute."""
    training = gpt(1280, 8, 16, 1024)
    each = warm(training.step)
    data = _pinned(int(tiny(1, 0) * 0.2 * each * 50e9 / 4) or 1024)
    target = torch.empty_like(data, device=DEVICE)
    stream = None if TINY else torch.cuda.Stream()

    def step() -> None:
        if stream is not None:
            with torch.cuda.stream(stream):
                target.copy_(data, non_blocking=True)
        training.step()
        sync()

    alone(run, step)


@kind()
def healthy_eval(run: Run) -> None:
    """Training for 2 s and evaluation on the GPU for 1 s take turns."""
    training = patches(768, 10, 160)
    warm(training.step)

    def step() -> None:
        if run.elapsed % 3 < 2:
            training.step()
        else:
            with torch.no_grad():
                training.forward(training.batch)

    alone(run, step)


@kind(hogs=8)
def healthy_neighbour(run: Run) -> None:
    """bf16 training beside a neighbour that burns half of the cores."""
    training = gpt(1280, 10, 16, 1024)
    warm(training.step)
    alone(run, training.step)


@kind()
def healthy_almost(run: Run) -> None:
    """5 % of the time goes to logging: not worth a word."""
    _python_step(run, gpt(1536, 8, 8, 1024).step, 0.2, 0.05)


@kind()
def healthy_full_memory(run: Run) -> None:
    """96 % of the memory is held from the start, and flat."""
    training = gpt(1536, 8, 12, 1024)
    warm(training.step)
    held = []
    if not TINY:
        free, total = torch.cuda.mem_get_info()
        held.append(torch.empty(int(free - 0.04 * total), dtype=torch.uint8, device=DEVICE))
    alone(run, training.step)


@kind()
def healthy_large_inference(run: Run) -> None:
    """bf16 inference at a large batch, results copied back."""
    training = patches(1024, 12, 256)

    def step() -> None:
        with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
            training.model(training.batch.float().div_(255)).argmax(-1).cpu()

    warm(step)
    alone(run, step)


@kind(seconds=12.0)
def healthy_compiled(run: Run) -> None:
    """A compiled model."""
    training = dense(4096, 8, 16384)
    if not TINY:
        training.model = torch.compile(training.model)
    warm(training.step)
    alone(run, training.step)


# ---------------------------------------------------------------------------------------------------------
# Memory


@kind("gpu_memory_leak", also=("gpu_oom_imminent",), seconds=14.0)
def gpu_leak_slow(run: Run) -> None:
    """20 MiB kept at each of about ten steps a second."""
    steps, _ = repeated(gpt(1024, 8, 8, 1024).step, 0.1)
    kept = []

    def step() -> None:
        steps()
        sync()
        kept.append(torch.empty(20 * MIB, dtype=torch.uint8, device=DEVICE))

    alone(run, step)


@kind("gpu_memory_leak", also=("gpu_oom_imminent",))
def gpu_leak_fast(run: Run) -> None:
    """120 MiB kept at each of about 20 steps a second."""
    steps, _ = repeated(patches(768, 6, 64).step, 0.05)
    kept = []

    def step() -> None:
        steps()
        sync()
        kept.append(torch.empty(tiny(120, 1) * MIB, dtype=torch.uint8, device=DEVICE))

    alone(run, step)


@kind("gpu_oom_imminent", also=("gpu_memory_leak",), seconds=14.0)
def gpu_nearly_full(run: Run) -> None:
    """From 70 % to 97 % of the memory."""
    steps, _ = repeated(gpt(1024, 8, 8, 1024).step, 0.05)
    kept = []
    free, total = (GIB, GIB) if TINY else torch.cuda.mem_get_info()
    kept.append(
        torch.empty(int(free - 0.30 * total) >> (20 if TINY else 0), dtype=torch.uint8, device=DEVICE)
    )
    piece = int(0.26 * total / (run.seconds / 0.06)) >> (10 if TINY else 0)

    def step() -> None:
        steps()
        sync()
        grown = sum(entry.numel() for entry in kept[1:])
        if grown < 0.27 * total * min(1.0, run.elapsed / run.seconds):
            kept.append(torch.empty(piece, dtype=torch.uint8, device=DEVICE))

    alone(run, step)


@kind("host_memory_leak", seconds=14.0)
def host_leak_slow(run: Run) -> None:
    """24 MiB of host memory kept a step, taken while the GPU computes."""
    steps, _ = repeated(gpt(1024, 8, 8, 1024).step, 0.1)
    kept = []

    def step() -> None:
        steps()
        kept.append(bytearray(b"x" * (tiny(24, 1) * MIB)))
        sync()

    alone(run, step)


@kind("host_memory_leak", seconds=14.0)
def host_leak_workers(run: Run) -> None:
    """4 workers keep 16 MiB of every batch; the GPU does not wait."""
    training = images(96, 3, 128, 160)
    each = warm(training.step)
    fed(run, training, 4, cpu=4 * each * 0.4, keep=tiny(16, 1) * MIB, depth=4)


# ---------------------------------------------------------------------------------------------------------
# Pauses


def _saving(run: Run, step: Step, gib: float, every: float, *, flush: bool) -> None:
    state = {
        str(place): torch.ones(int(gib * GIB / 16) >> (8 if TINY else 0), device=DEVICE) for place in range(4)
    }
    warm(step)
    run.begin()
    last = time.time()
    while run.going():
        step()
        sync()
        run.steps += 1
        if time.time() - last >= every:
            run.mark("save")
            with open(SCRATCH, "wb") as file:
                torch.save(state, file)
                if flush:
                    file.flush()
                    os.fsync(file.fileno())
            run.mark("saved")
            last = time.time()


@kind("checkpoint_stall", seconds=24.0)
def checkpoint_6s(run: Run) -> None:
    """2 GiB saved and flushed after every 6 s of training."""
    _saving(run, gpt(1024, 8, 8, 1024).step, 2.0, 6.0, flush=True)


@kind("checkpoint_stall", seconds=16.0)
def checkpoint_3s(run: Run) -> None:
    """2 GiB saved into the page cache after every 3 s of training."""
    _saving(run, patches(768, 8, 96).step, 2.0, 3.0, flush=False)


@kind("periodic_stall", also=("host_single_thread",), seconds=15.0)
def host_eval(run: Run) -> None:
    """1.5 s of host-only work in every 4 s."""
    _pausing(run, patches(768, 8, 96).step, 4.0, lambda: burn(1.5))


@kind("periodic_stall", also=("host_wait_unattributed",), seconds=17.0)
def service_pause(run: Run) -> None:
    """The program sleeps for 2 s in every 6 s (an upload of metrics that hangs)."""
    _pausing(run, gpt(1024, 8, 8, 1024).step, 6.0, lambda: time.sleep(2.0))


@kind("periodic_stall", seconds=20.0)
def short_pauses(run: Run) -> None:
    """The program sleeps for 1.2 s in every 3 s."""
    _pausing(run, gpt(1024, 8, 8, 1024).step, 3.0, lambda: time.sleep(1.2))


@kind("periodic_stall", also=("host_wait_unattributed",), seconds=20.0)
def shorter_pauses(run: Run) -> None:
    """The program sleeps for 0.8 s in every 3 s."""
    _pausing(run, gpt(1024, 8, 8, 1024).step, 3.0, lambda: time.sleep(0.8))


@kind("periodic_stall", also=("host_single_thread",), seconds=20.0)
def host_eval_threads(run: Run) -> None:
    """1.5 s of matrix products on all cores in every 5 s."""

    def evaluate() -> None:
        end = time.time() + 1.5
        a = torch.rand(tiny(2048, 64), tiny(2048, 64))
        while time.time() < end:
            a @ a

    _pausing(run, images(64, 3, 320, 160).step, 5.0, evaluate)


def _pausing(run: Run, step: Step, every: float, pause: Step) -> None:
    warm(step)
    run.begin()
    last = time.time()
    while run.going():
        step()
        sync()
        run.steps += 1
        if time.time() - last >= every * 0.6:
            run.mark("eval")
            pause()
            last = time.time()


@kind("throughput_regression", also=("host_single_thread",), seconds=18.0)
def regression(run: Run) -> None:
    """From the middle on each step does host work for 40 % of the time."""
    steps, each = repeated(gpt(1024, 8, 8, 1024).step, 0.06)
    told = False
    run.begin()
    while run.going():
        steps()
        sync()
        run.steps += 1
        if run.elapsed > run.seconds / 2:
            if not told:
                run.mark("slow")
                told = True
            burn(each * 0.4 / 0.6)


@kind("throughput_regression", also=("host_wait_unattributed",), seconds=18.0)
def regression_wait(run: Run) -> None:
    """From the middle on each step waits for a service for 30 % of the time."""
    steps, each = repeated(images(64, 3, 320, 160).step, 0.08)
    told = False
    run.begin()
    while run.going():
        steps()
        sync()
        run.steps += 1
        if run.elapsed > run.seconds / 2:
            if not told:
                run.mark("slow")
                told = True
            time.sleep(each * 0.3 / 0.7)


@kind("collective_hang", also=("thin_kernels",))
def hang(run: Run) -> None:
    """After some training one kernel spins and the program waits for it."""
    training = gpt(1024, 8, 16, 1024)
    warm(training.step)
    run.begin()
    if not TINY:
        torch.cuda._sleep(int(run.seconds * 1.9e9))
    sync()


_POLL = r"""
extern "C" __global__ void poll(volatile int* flag, long long cycles) {
    long long until = clock64() + cycles;
    while (*flag == 0 && clock64() < until) {}
}
"""


def _hanging(run: Run, *, blocks: int, on_host: bool) -> None:
    """Train for ten seconds, then poll a flag that nobody sets, as a rank does that waits for the others."""
    import cupy  # type: ignore[import-not-found,unused-ignore]  # noqa: PLC0415  only these kinds need it

    training = gpt(1024, 8, 16, 1024)
    kernel = cupy.RawKernel(_POLL, "poll")
    flag = torch.zeros(1, dtype=torch.int32, device="cpu" if on_host else DEVICE, pin_memory=on_host)
    warm(training.step)
    run.begin()
    while run.elapsed < 10.0:
        training.step()
        sync()
        run.steps += 1
    run.mark("hang")
    kernel((blocks,), (512,), (cupy.uint64(flag.data_ptr()), cupy.int64((run.seconds - 10.0) * 1.98e9)))
    cupy.cuda.Device().synchronize()
    sync()


@kind("collective_hang", seconds=50.0)
def hang_after_training(run: Run) -> None:
    """Ten seconds of training, then 24 blocks poll a flag in GPU memory."""
    _hanging(run, blocks=24, on_host=False)


@kind("collective_hang", seconds=50.0)
def hang_on_host_flag(run: Run) -> None:
    """Ten seconds of training, then 2 blocks poll a flag in host memory."""
    _hanging(run, blocks=2, on_host=True)


@kind("thin_kernels", seconds=30.0)
def thin_after_training(run: Run) -> None:
    """Ten seconds of training, then one small matrix product after the other in a graph."""
    training = gpt(1024, 8, 16, 1024)
    a = torch.randn(tiny(256, 16), tiny(256, 16), device=DEVICE)

    def chain() -> None:
        b = a
        for _ in range(400):
            b = torch.tanh(b @ a)

    small = _graphed(chain)
    warm(training.step)
    run.begin()
    while run.elapsed < 10.0:
        training.step()
        sync()
        run.steps += 1
    run.mark("thin")
    while run.going():
        small()
        sync()


# ---------------------------------------------------------------------------------------------------------
# Demand and sharing


@kind("gpu_underused", also=("host_wait_unattributed",))
def serving_20(run: Run) -> None:
    """20 small requests a second."""
    training = patches(768, 8, 4)
    _serving(run, training, 0.05)


@kind("gpu_underused", also=("host_wait_unattributed",), seconds=14.0)
def serving_slow(run: Run) -> None:
    """One request of about 0.15 s every 2 s."""
    training = gpt(2048, 8, 8, 512)
    with torch.no_grad():
        steps, _ = repeated(lambda: training.forward(training.batch), 0.15)
        run.begin()
        while run.going():
            steps()
            sync()
            run.steps += 1
            time.sleep(1.85)


def _serving(run: Run, training: Training, pause: float) -> None:
    def request() -> None:
        with torch.no_grad():
            training.forward(training.batch).cpu()

    warm(request)
    run.begin()
    while run.going():
        request()
        run.steps += 1
        time.sleep(pause)


@kind("gpu_idle_allocated", seconds=12.0)
def idle_allocated(run: Run) -> None:
    """20 GiB held by a process that worked before and now sleeps."""
    training = gpt(768, 6, 8, 512)
    held = torch.ones((tiny(20, 1) * GIB) >> (10 if TINY else 0), dtype=torch.uint8, device=DEVICE)
    warm(training.step, 2.0)
    run.begin()
    time.sleep(run.seconds)
    del held


@kind("gpu_idle_allocated", seconds=20.0, hogs=3 * CPUS)
def idle_beside_hogs(run: Run) -> None:
    """20 GiB held by a process that sleeps, beside 48 spinning neighbours."""
    idle_allocated(run)


@kind("gpu_contention", processes=2, seconds=12.0)
def two_trainings(run: Run) -> None:
    """A decoder and a vision transformer train on one card."""
    training = patches(768, 8, 96) if run.role else gpt(1280, 8, 8, 1024)
    warm(training.step)
    if run.role:
        run.seconds += 4
    alone(run, training.step)


@kind("gpu_contention", processes=2, seconds=12.0)
def training_and_service(run: Run) -> None:
    """A training, and a service beside it that wants a third of the card."""
    if run.role == 0:
        training = images(96, 3, 128, 160)
        warm(training.step)
        alone(run, training.step)
        return
    service = patches(768, 8, 64)
    each = warm(service.step)
    run.seconds += 4
    run.begin()
    while run.going():
        service.step()
        sync()
        time.sleep(each)


# ---------------------------------------------------------------------------------------------------------
# CPUs


@kind(
    "cpu_oversubscribed",
    also=("throughput_regression", "input_cpu_bound"),
    seconds=18.0,
    hogs=3 * CPUS,
    hogs_after=7.0,
)
def hogs_beside_loader(run: Run) -> None:
    """Healthy with 6 workers until the mark, then 48 spinning neighbours."""
    training = images(64, 3, 256, 160)
    each = warm(training.step)
    fed(run, training, 6, cpu=6 * each * 0.7, depth=2)


@kind("cpu_oversubscribed", also=("throughput_regression",), seconds=18.0, hogs=4 * CPUS, hogs_after=7.0)
def hogs_beside_launches(run: Run) -> None:
    """A training whose launches take half of the step, then 64 spinning neighbours."""
    training = gpt(1024, 12, 4, 512)
    warm(training.step)
    alone(run, training.step)


@kind("cpu_oversubscribed", also=("input_cpu_bound",))
def threads_in_workers(run: Run) -> None:
    """8 workers with 16 threads each."""
    training = images(64, 3, 192, 160)
    warm(training.step)
    fed(run, training, 8, threads=CPUS)


# ---------------------------------------------------------------------------------------------------------
# Running them


def _hog() -> None:
    while True:
        pass


def _become(log: str) -> None:
    os.setpgid(0, 0)
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)


def _forked(what: Callable[[], None], log: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _become(log)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        what()
        code = 0
    except BaseException:  # noqa: BLE001  the log says it, and nothing of the parent may run here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def launch(name: str, seconds: float | None, log: str, patience: float = 25.0) -> dict[str, Any]:
    """Run one kind in processes of its own; what its log says, and `code`."""
    entry = KINDS[name]
    length = entry.seconds if seconds is None else seconds

    def program(role: int) -> None:
        run = Run(length, role)
        entry.function(run)
        run.end()

    pids = [_forked(lambda role=role: program(role), log) for role in range(entry.processes)]  # type: ignore[misc]
    hogs: list[int] = []
    told: dict[str, Any] = {}
    deadline = time.time() + length + patience
    code: int | None = None
    while code is None and time.time() < deadline:
        time.sleep(0.02)
        done, status = os.waitpid(pids[0], os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if done else None
        if entry.hogs and not hogs and not done:
            told = parse(log)
            if "begin" in told and time.time() >= told["begin"] + entry.hogs_after:
                if entry.hogs_after:
                    with open(log, "a", encoding="utf-8") as file:
                        file.write(f"mark {time.time():.3f} hogs\n")
                hogs = [_forked(_hog, log) for _ in range(entry.hogs)]
    for pid in [*pids, *hogs]:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    for pid in [*(pids[1:] if code is not None else pids), *hogs]:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    return {**parse(log), "code": code}


def parse(log: str) -> dict[str, Any]:
    """The begin, the end, the steps and the marks of a log."""
    told: dict[str, Any] = {"marks": []}
    with contextlib.suppress(FileNotFoundError), open(log, encoding="utf-8", errors="replace") as file:
        for line in file:
            words = line.split()
            if words[:1] == ["begin"]:
                told["begin"] = float(words[1])
            elif words[:1] == ["end"]:
                told["end"], told["steps"] = float(words[1]), int(words[3])
            elif words[:1] == ["mark"]:
                told["marks"].append({"at": float(words[1]), "what": words[2]})
            elif words[:1] == ["fact"]:
                told.setdefault("facts", {}).update(
                    {key: float(value) for key, value in (word.split("=") for word in words[1:])}
                )
    return told


_NOT_IN_SMOKE = {"healthy_compiled", "threads_in_workers"}
"""One compiles for long; the other needs a parent that has had no thread pool of its own."""


def smoke(names: list[str], seconds: float) -> int:
    """Every kind for a moment in this process; how many failed."""
    global WARM  # noqa: PLW0603  nothing else runs in this process
    WARM = 0.2
    failed = 0
    for name in names:
        began = time.time()
        run = Run(seconds)
        print(f"--- {name}", flush=True)
        try:
            KINDS[name].function(run)
            run.end()
            print(
                f"    {run.steps / max(run.elapsed, 1e-9):.1f} steps/s, took {time.time() - began:.1f} s",
                flush=True,
            )
        except Exception:  # noqa: BLE001  the next one may work
            failed += 1
            traceback.print_exc(limit=-3)
        gc.collect()
        if not TINY:
            torch.cuda.empty_cache()
    print(f"{failed} of {len(names)} failed", flush=True)
    return failed


def main() -> int:
    """Run one kind, or all of them for a moment."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", nargs="?", default=os.environ.get("WORKLOAD_KIND"))
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.list:
        for entry in KINDS.values():
            print(f"{entry.name:24} {','.join(entry.expect) or '-':24} {entry.note}")
        return 0
    if options.smoke:
        names = [options.kind] if options.kind else [name for name in KINDS if name not in _NOT_IN_SMOKE]
        return smoke(names, options.seconds or 0.2)
    if options.kind not in KINDS:
        parser.error("which kind? --list names them")
    with tempfile.NamedTemporaryFile("r", suffix=".log") as log:
        told = launch(options.kind, options.seconds, log.name)
        print(log.read(), end="")
    return int(told["code"] or 0) if told["code"] is not None else 1


if __name__ == "__main__":
    sys.exit(main())
