"""What a head does about idle GPUs: events, messages, hooks, and what it remembers."""

from __future__ import annotations

import asyncio
import os
import pwd
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpulse.cluster.head.idle_watch import IdleWatch
from gpulse.cluster.notify.idle_hook import HookUser, IdleConfig
from gpulse.cluster.notify.idle_policy import EpisodeFile, Exemptions, IdlePolicy
from gpulse.cluster.notify.outbox import Message
from gpulse.model.frame import Frame
from gpulse.model.process import GpuProcess, Owner
from tests.integration.cluster import until
from tests.unit.frames import NOON, frame, gpu, process

POLICY = IdlePolicy(
    60.0,
    20.0,
    20.0,
    dry_run=False,
    users=(("ada", "ada@example.org"), ("eve", "eve-chat")),
    mail_target="mail",
    targets=("ops",),
)
STEPS = ["idle_warning", "idle_second_warning", "idle_hook_started", "idle_hook_ended"]


def holder(user: str = "ada", job: str | None = "slurm:1", busy: float = 0.0, index: int = 0) -> Frame:
    """A node with one GPU that somebody holds."""
    made = process(7)
    own = made._replace(identity=made.identity._replace(owner=Owner(user, 1000, job)))
    held = gpu(index, {"gpu_utilization_ratio": busy}, (GpuProcess(7, "compute"),))
    return frame(held, processes=(own,))


class Lab:
    """A watch with a clock, nodes and records of its own."""

    def __init__(self, directory: Path, policy: IdlePolicy) -> None:
        account = pwd.getpwuid(os.geteuid())
        self.user = HookUser(account.pw_name, account.pw_uid, account.pw_gid, (account.pw_gid,), "/")
        self.directory, self.policy = directory, policy
        self.now = NOON
        self.frames: dict[str, Frame | None] = {"node1": holder()}
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.sent: list[tuple[str, Sequence[str], str | None]] = []
        self.waiting: set[str] = set()
        self.unstored: set[str] = set()
        self.is_full = False
        self.layouts: dict[int, Any] = {}
        self.watch = self.made()
        self._loop = asyncio.Runner()
        self._hook_ended = asyncio.Event()

    def close(self) -> None:
        """End the event loop."""
        self._loop.close()

    def made(self) -> IdleWatch:
        """A new watch, as after a restart of the head."""
        lab: Any = self
        return IdleWatch(
            IdleConfig(self.policy, self.user if self.policy.hook else None),
            lab,
            lab,
            lab,
            str(self.directory),
            now=lambda: self.now,
            interval_seconds=lambda: 0.5,
        )

    # --- what the watch sees of a head

    @property
    def members(self) -> dict[int, Any]:
        """The nodes."""
        return {
            number: SimpleNamespace(
                name=name,
                stored=SimpleNamespace(id=number),
                is_here=shown is not None,
                knows_processes=True,
                frame=self._newest(shown),
                interval_seconds=None,
                processes={},
                jobs={},
            )
            for number, (name, shown) in enumerate(self.frames.items(), 1)
        }

    def _newest(self, shown: Frame | None) -> Callable[[object], Frame | None]:
        return lambda _: None if shown is None else shown._replace(time=self.now)

    def event(self, kind: str, _node: int | None, **detail: Any) -> None:
        """Keep an event."""
        self.events.append((kind, detail))
        if kind == "idle_hook_ended":
            self._hook_ended.set()

    def note(self, fact: str, **fields: Any) -> None:
        """Keep a fact; there is none."""

    def send(self, message: Message, targets: Sequence[str], *, recipient: str | None = None) -> bool:
        """Keep a message, unless too many wait."""
        if not self.is_full:
            self.sent.append((message.title, targets, recipient))
        return not self.is_full

    def is_stored(self, key: str) -> bool:
        """Whether a message is on disk."""
        return not any(mark in key for mark in self.unstored)

    def is_waiting(self, key: str) -> bool:
        """Whether a message is not delivered yet."""
        return any(mark in key for mark in self.waiting)

    # --- the test's side

    @property
    def kinds(self) -> list[str]:
        """The kinds of the events so far."""
        return [kind for kind, _ in self.events]

    def play(self, seconds: float, *, restart: bool = True) -> None:
        """Let time pass, and hooks end."""

        async def run() -> None:
            if restart:
                self.watch = self.made()
                await self.watch.restore()
            hooks = asyncio.create_task(self.watch.run_hooks())
            for _ in range(round(seconds / 2)):
                self.now += 2.0
                await self.watch.step()
                while not self.policy.dry_run and self.has_running_hook:
                    await self.wait_for_hook()
            hooks.cancel()

        self.run(run())

    def run(self, work: Coroutine[None, None, None]) -> None:
        """Run something in the event loop."""
        self._loop.run(work)

    @property
    def has_running_hook(self) -> bool:
        """Whether a hook was started and has not ended."""
        return self.kinds.count("idle_hook_started") > self.kinds.count("idle_hook_ended")

    async def wait_for_hook(self) -> None:
        """Wait for the end of a hook."""
        self._hook_ended.clear()
        async with asyncio.timeout(60.0):
            await self._hook_ended.wait()


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """A lab whose hook adds a line to a file."""
    made = Lab(tmp_path, hooked(tmp_path))
    yield made
    made.close()


def hooked(directory: Path, *more: str) -> IdlePolicy:
    """A policy whose hook adds a line to a file."""
    hook = ("/bin/sh", "-c", f'echo "$1" >>{directory}/runs', "hook", *(more or ("{job}",)))
    return POLICY._replace(hook=hook)


def test_steps(lab: Lab, tmp_path: Path) -> None:
    """Events, messages to the user and to operators, and the hook, each once."""

    lab.play(300.0)

    assert lab.kinds == STEPS
    assert (tmp_path / "runs").read_text() == "slurm:1\n"
    assert lab.events[0][1] == {
        "job": "slurm:1",
        "user": "ada",
        "gpus": ["0"],
        "idle_seconds": 60.0,
    }
    assert [title for title, _, to in lab.sent if to == "ada@example.org"] == [
        "Unused for 1 min: GPU 0 on node1",
        "Second warning, unused for 1 min: GPU 0 on node1",
    ]
    assert [targets for _, targets, to in lab.sent if to is None] == [("ops",)] * 4


def test_restart(lab: Lab) -> None:
    """A head that is restarted all the time repeats no step."""

    for _ in range(30):
        lab.play(140.0)

    assert lab.kinds == STEPS


def test_crash_before_the_hook(lab: Lab, tmp_path: Path) -> None:
    """A head that was killed after it had decided to run the hook does not run it, and says so."""

    lab.play(84.0)
    (track,), _ = EpisodeFile(str(tmp_path)).load()
    EpisodeFile(str(tmp_path)).save([track._replace(level=3, is_pending=True)], [])
    lab.play(400.0)

    assert lab.kinds == [*STEPS[:2], "idle_hook_ended"]
    assert lab.events[-1][1]["outcome"] == "unknown"
    assert not (tmp_path / "runs").exists()


def test_resolved(lab: Lab) -> None:
    """Use ends an episode, and the user is told; leaving it does, too, after a while."""

    lab.policy = POLICY
    lab.play(70.0)
    lab.frames["node1"] = holder(busy=0.9)
    lab.play(10.0)
    lab.frames["node1"] = holder()
    lab.play(70.0)
    lab.frames["node1"] = frame(gpu(0, {"gpu_utilization_ratio": 0.0}))
    lab.play(10.0)
    assert lab.kinds == ["idle_warning", "idle_resolved", "idle_warning"]
    lab.play(20.0)

    assert lab.kinds == ["idle_warning", "idle_resolved"] * 2
    assert [detail["reason"] for kind, detail in lab.events if kind == "idle_resolved"] == [
        "used",
        "released",
    ]
    assert [to for title, _, to in lab.sent if title.startswith("No longer idle")] == ["ada@example.org"] * 2


def test_dry_run(lab: Lab, tmp_path: Path) -> None:
    """A dry run writes the events, tells operators alone, and runs nothing; acting starts with the first warning."""

    lab.policy = lab.policy._replace(dry_run=True)
    lab.play(300.0)

    assert set(lab.kinds) == {"idle_dry_run"}
    assert [detail["step"] for _, detail in lab.events] == ["warn", "warn_again", "hook"]
    assert {targets for _, targets, _ in lab.sent} == {("ops",)}
    assert all(title.startswith("Dry run: ") for title, _, _ in lab.sent)
    assert not (tmp_path / "runs").exists()

    lab.policy = lab.policy._replace(dry_run=False)
    lab.events.clear()
    lab.play(10.0)
    assert not (tmp_path / "runs").exists()
    lab.play(200.0)
    assert lab.kinds == STEPS


@pytest.mark.parametrize(
    "exempt", [Exemptions(users=("ada",)), Exemptions(jobs=("slurm:*",)), Exemptions(nodes=("node1",))]
)
def test_exempt(lab: Lab, exempt: Exemptions) -> None:
    """Who is exempt is never touched."""

    lab.policy = lab.policy._replace(exempt=exempt)
    lab.play(400.0)

    assert (lab.events, lab.sent) == ([], [])


def test_no_job_for_the_hook(lab: Lab) -> None:
    """A hook that needs a job does not run for a user without one, who is only warned."""

    lab.frames["node1"] = holder("eve", None)
    lab.play(400.0)

    assert lab.kinds == STEPS[:2]
    assert [targets for _, targets, _ in lab.sent if targets != ("ops",)] == [("eve-chat",)] * 2


def test_hostile_job(lab: Lab, tmp_path: Path) -> None:
    """A job whose name is not safe as an argument gets warnings; operators read why the hook was not run."""

    lab.frames["node1"] = holder(job="slurm:1 --all\n")
    lab.play(400.0)

    assert lab.kinds == STEPS
    assert lab.events[-1][1]["outcome"] == "refused"
    assert "not safe as an argument" in lab.events[-1][1]["reason"]
    assert not (tmp_path / "runs").exists()
    assert all(title.isprintable() for title, _, _ in lab.sent)


def test_undelivered_warning(lab: Lab) -> None:
    """The hook waits until the mail server has accepted the warnings."""

    lab.waiting = {":warn_again:user"}
    lab.play(400.0)
    assert lab.kinds == STEPS[:2]
    lab.waiting = set()
    lab.play(120.0)

    assert lab.kinds == STEPS


def test_refused_warning(lab: Lab) -> None:
    """A warning that the sender has no room for is sent later, once, and the hook waits for it."""

    lab.is_full = True
    lab.play(400.0, restart=False)
    assert (lab.kinds, lab.sent) == (STEPS[:1], [])
    lab.is_full = False
    lab.play(200.0, restart=False)

    assert lab.kinds == STEPS
    assert [title[:14] for title, _, to in lab.sent if to == "ada@example.org"] == [
        "Unused for 1 m",
        "Second warning",
    ]


def test_killed_before_the_warning_is_stored(lab: Lab) -> None:
    """The next head warns again, because nobody may have been warned; then it goes on."""

    lab.unstored = {":warn:user"}
    lab.play(400.0)
    assert lab.kinds == STEPS[:1]
    lab.unstored = set()
    lab.play(200.0)

    assert lab.kinds == [STEPS[0], *STEPS]


def test_hooks_per_hour(lab: Lab) -> None:
    """At most so many hooks run in an hour; the others run later."""

    lab.policy = lab.policy._replace(max_hooks_per_hour=2)
    lab.frames = {f"node{number}": holder(job=f"slurm:{number}") for number in range(5)}
    lab.play(600.0)
    assert lab.kinds.count("idle_hook_started") == 2
    lab.play(3600.0)

    assert lab.kinds.count("idle_hook_started") == 4


def test_unknown_data(lab: Lab) -> None:
    """While a node is away, nothing is done; when it is back, everything is observed anew."""

    lab.play(98.0)
    lab.frames["node1"] = None
    lab.play(600.0, restart=False)
    lab.frames["node1"] = holder()
    lab.play(90.0, restart=False)
    assert lab.kinds == STEPS[:2]
    lab.play(20.0, restart=False)

    assert lab.kinds == STEPS


def test_full_disk(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be remembered is not done."""

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(EpisodeFile, "save", fail)
        lab.play(400.0)
        assert (lab.events, lab.sent) == ([], [])
    lab.play(200.0)

    assert lab.kinds == STEPS


def test_error(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """An error is logged once, and only stops the clock."""

    lab.play(70.0)
    broken: Any = SimpleNamespace(_replace=lambda **_: SimpleNamespace(time=lab.now))
    good, lab.frames = lab.frames, {"node1": broken}
    lab.play(40.0, restart=False)
    lab.frames = good
    lab.play(90.0, restart=False)

    assert lab.kinds == STEPS[:2]
    assert [record.message for record in caplog.records if record.exc_info] == [
        "the watch for idle GPUs failed because of a bug in gpulse; trying again"
    ]


def test_changed_while_waiting(lab: Lab, tmp_path: Path) -> None:
    """A hook that waited behind another one does not run when its GPUs are used meanwhile."""

    release = tmp_path / "release"
    policy = hooked(tmp_path)._replace(
        hook=("/bin/sh", "-c", f'echo "$1" >>{tmp_path}/runs; read line <{release}', "hook", "{job}")
    )
    os.mkfifo(release)
    lab.policy = policy
    lab.watch = lab.made()
    lab.frames = {"node1": holder(job="slurm:1"), "node2": holder(job="slurm:2")}

    async def run() -> None:
        await lab.watch.restore()
        hooks = asyncio.create_task(lab.watch.run_hooks())
        while lab.kinds.count("idle_hook_started") < 2:
            lab.now += 2.0
            await lab.watch.step()
        await asyncio.to_thread(until, (tmp_path / "runs").exists, "the first hook")
        lab.frames = {name: holder(job=f"slurm:{name[-1]}", busy=0.9) for name in lab.frames}
        lab.now += 2.0
        await lab.watch.step()
        ended = asyncio.create_task(lab.wait_for_hook())
        await asyncio.to_thread(release.write_text, "\n")
        await ended
        hooks.cancel()

    lab.run(run())

    assert (tmp_path / "runs").read_text() == "slurm:1\n"
    assert lab.kinds.count("idle_hook_ended") == 1
