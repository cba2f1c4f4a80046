"""Stacks from agents to a head: within limits on both sides, with a deadline, and with a reason where there are none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulse.cluster.agent import line_collection
from gpulse.cluster.agent.line_collection import StackAnswers
from gpulse.cluster.head import stack_requests
from gpulse.cluster.head.fleet import Fleet
from gpulse.cluster.head.stack_requests import StackRequests, find_nodes_to_ask
from gpulse.cluster.protocol.stack_codec import MAX_ANSWER_BYTES, ReadProcess, decode_stacks, encode_stacks
from gpulse.cluster.wire_pb2 import HeadMessage, StackAnswer, StackRequest
from gpulse.diagnosis.stack_groups import StackProcess
from gpulse.errors import RefusedError
from gpulse.model.device import Device, Node
from gpulse.model.frame import Frame, GpuReading
from gpulse.model.job import Job
from gpulse.model.message_limits import MAX_CODE_TEXT_CHARS
from gpulse.model.process import GpuProcess, Owner, ProcessIdentity, ProcessReading
from gpulse.model.python_stack import ProcessStacks, StackFrame, StackProblem, ThreadStack
from gpulse.sources.python_stacks import StackReader
from gpulse.store.store import StoredNode

TRAINER = StackProcess(100, "main", "python3", ("0", "1"))
THREAD = ThreadStack(
    "MainThread",
    100,
    is_active=True,
    frames=(StackFrame("/home/ada/train.py", 84, "step", "train.py"),),
)
READ = (TRAINER, ProcessStacks(100, 1000.0, (THREAD,)))
REFUSED = (
    StackProcess(101, "worker"),
    ProcessStacks(101, 1000.0, problem=StackProblem("gone", "process 101 ended", "x")),
)


def get_time() -> float:
    """The time of all answers."""
    return 1000.0


def test_stacks_arrive_as_they_were_read() -> None:
    """With the name of their node."""

    found = decode_stacks(encode_stacks([READ, REFUSED]), "n1")

    assert [
        (TRAINER._replace(node="n1"), READ[1]),
        (REFUSED[0]._replace(node="n1"), REFUSED[1]),
    ] == found


def test_threads_that_wait_in_libraries_stay_there() -> None:
    """The main thread is first, and threads with code of the user or that run are sent, too."""

    library = (StackFrame("/usr/lib/python3.11/threading.py", 5, "wait"),)
    waiting = ThreadStack("pool", 7, is_active=False, frames=library)
    own = ThreadStack("loader", 8, is_active=False, frames=THREAD.frames)
    stacks = ProcessStacks(100, 1000.0, (waiting, own, THREAD))

    ((_, found),) = decode_stacks(encode_stacks([(TRAINER, stacks)]), "n1")

    assert ("MainThread", "loader") == tuple(thread.name for thread in found.threads)


@pytest.mark.parametrize("word", ["x" * 100_000, "\udcff\udcfe", "a\0b", "line\nbreak\x1b[2J"])
def test_whatever_a_program_is_called_passes(word: str) -> None:
    """Agents cut off what heads refuse."""

    frames = (StackFrame(word, 1, word, word),) * 1000
    threads = tuple(ThreadStack(word, n, is_active=True, frames=frames) for n in range(200))
    process = StackProcess(5, "main", word, (word,) * 1000)
    problem = StackProblem("failed", word, word)

    data = encode_stacks(
        [(process, ProcessStacks(5, 1.0, threads)), (process, ProcessStacks(5, 1.0, problem=problem))]
    )

    assert 2 == len(decode_stacks(data, "n1"))
    assert word.isprintable() or word.encode("utf-8", "surrogatepass") not in data


def test_too_many_stacks_are_cut_to_main_threads_and_then_to_fewer_processes() -> None:
    """Never above the limit."""

    frames = tuple(StackFrame(f"/{'d' * 500}/{n}.py", n, "f" * 250) for n in range(128))
    threads = tuple(ThreadStack(f"t{n}", n, is_active=True, frames=frames) for n in range(3))
    many = [(StackProcess(pid, "main"), ProcessStacks(pid, 1.0, threads)) for pid in range(60)]

    data = encode_stacks(many)

    found = decode_stacks(data, "n1")
    assert len(data) <= MAX_ANSWER_BYTES
    assert {1} == {len(stacks.threads) for _, stacks in found}
    assert [0, 1, 2] == [process.pid for process, _ in found[:3]]


DOCUMENT: dict[str, Any] = {
    "pid": 5,
    "role": "main",
    "name": "n",
    "gpus": ["0"],
    "time": 1.0,
    "threads": [{"name": "t", "active": True, "frames": [["/a.py", 1, "f", "a.py"]]}],
}


@pytest.mark.parametrize(
    "change",
    [
        {"pid": -1},
        {"pid": "5"},
        {"role": "root"},
        {"name": "\0"},
        {"gpus": ["0"] * 1000},
        {"time": 1e300},
        {"threads": [{"name": "t", "active": True, "frames": []}]},
        {"threads": DOCUMENT["threads"] * 100},
        {"threads": [{"name": "t", "active": 1, "frames": [["/a.py", 1, "f", "a.py"]]}]},
        {"threads": [{"name": "t", "active": True, "frames": [["x" * 600, 1, "f", ""]]}]},
        {"threads": [{"name": "t", "active": True, "frames": [["/a.py", 1 << 40, "f", ""]]}]},
        {"problem": {"code": "other", "reason": "r"}},
        {"problem": {"code": "gone", "reason": "r" * 5000}},
    ],
)
def test_hostile_stacks_are_refused(change: dict[str, Any]) -> None:
    """Every field has a type and a limit."""

    assert 1 == len(decode_stacks(msgspec.json.encode([DOCUMENT]), "n1"))
    with pytest.raises(ValueError, match="the stacks are not valid"):
        decode_stacks(msgspec.json.encode([DOCUMENT | change]), "n1")


@given(st.binary(max_size=200) | st.integers(1, 5000).map(lambda depth: b"[" * depth))
def test_no_bytes_harm_the_decoder(data: bytes) -> None:
    """They are refused or taken."""

    with suppress(ValueError):
        assert [] == decode_stacks(data, "n1")


def test_large_answers_are_refused_before_they_are_parsed() -> None:
    """Whatever they hold."""

    with pytest.raises(ValueError, match="larger than 4 MiB"):
        decode_stacks(b" " * (MAX_ANSWER_BYTES + 1), "n1")


# --- the head's side


class Stream:
    """A connected agent that answers as it is told, or not at all."""

    def __init__(self, answer: Callable[[StackRequest], None] | None, *, is_new: bool = True) -> None:
        self.answers_stacks = is_new
        self._answer = answer
        self.heard: list[HeadMessage] = []

    def send_message(self, message: HeadMessage) -> None:
        """Hear a message."""
        self.heard.append(message)
        if self._answer is not None:
            self._answer(message.stacks)


async def test_every_node_is_accounted_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers, refusals, invalid answers, silence, old agents, agents that leave and nodes without an agent."""

    monkeypatch.setattr(stack_requests, "ANSWER_SECONDS", 0.2)
    streams: dict[int, Stream] = {}
    requests = StackRequests(lambda: streams)
    good = encode_stacks([READ])
    streams |= {
        1: Stream(lambda asked: requests.answered(1, StackAnswer(id=asked.id, processes=good))),
        2: Stream(lambda asked: requests.answered(2, StackAnswer(id=asked.id, refusal="no\x1b"))),
        3: Stream(lambda asked: requests.answered(3, StackAnswer(id=asked.id, processes=b"{"))),
        4: Stream(None),
        5: Stream(None, is_new=False),
        6: Stream(lambda _: requests.disconnected(6)),
        7: Stream(lambda asked: requests.answered(7, StackAnswer(id=asked.id + 1, processes=good))),
        9: Stream(lambda asked: requests.answered(9, StackAnswer(id=asked.id, processes=b"[]"))),
    }

    answer = await requests.read({number: f"n{number}" for number in range(1, 10)}, "slurm:1", get_time)

    assert "1970-01-01T00:16:40.000Z" == answer.time
    assert [[("n1", 100)]] == [[(each.node, each.pid) for each in group.processes] for group in answer.groups]
    reasons = {each.node: each.reason for each in answer.unanswered}
    assert [f"n{number}" for number in range(2, 10)] == list(reasons)
    assert "no?" == reasons["n2"]
    assert reasons["n3"].startswith("cannot use the agent's answer: the stacks are not valid")
    assert [
        "the agent did not answer within 0.2 s",
        "the agent is older than this head and cannot read stacks",
        "the agent disconnected before it answered",
        "the agent did not answer within 0.2 s",
        "the agent is not connected to this head",
        "no process of job slurm:1 uses a GPU there",
    ] == [reasons[f"n{number}"] for number in range(4, 10)]
    assert [] == streams[5].heard
    assert ["slurm:1"] == [message.stacks.job for message in streams[4].heard]


async def test_late_and_unasked_answers_are_ignored() -> None:
    """Nobody waits for them."""

    requests = StackRequests(dict)

    requests.answered(1, StackAnswer(id=5, processes=b"x"))
    requests.disconnected(1)
    answer = await asyncio.wait_for(requests.read({}, None, get_time), 60)
    assert ([], [], []) == (answer.groups, answer.problems, answer.unanswered)


async def test_idle_nodes_are_named() -> None:
    """Without a job as well; nothing would be printed about them otherwise."""

    streams: dict[int, Stream] = {}
    requests = StackRequests(lambda: streams)
    streams[1] = Stream(lambda asked: requests.answered(1, StackAnswer(id=asked.id, processes=b"[]")))

    answer = await requests.read({1: "n1"}, None, get_time)

    assert [("n1", "no process uses a GPU there")] == [(each.node, each.reason) for each in answer.unanswered]


async def test_all_answers_together_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes that answer after it are named."""

    streams: dict[int, Stream] = {}
    requests = StackRequests(lambda: streams)
    good = encode_stacks([READ])
    monkeypatch.setattr(stack_requests, "MAX_TOTAL_BYTES", 2 * len(good))

    def answer_as(node: int) -> Stream:
        return Stream(lambda asked: requests.answered(node, StackAnswer(id=asked.id, processes=good)))

    streams |= {node: answer_as(node) for node in (1, 2, 3)}

    for _ in range(2):  # the limit is that of one request
        answer = await requests.read({1: "n1", 2: "n2", 3: "n3"}, None, get_time)

        assert ["n1", "n2"] == [each.node for group in answer.groups for each in group.processes]
        assert [("n3", "the stacks of all nodes together are larger than 0 MiB; name fewer nodes")] == [
            (each.node, each.reason) for each in answer.unanswered
        ]


async def test_the_head_answers_others_while_it_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another request for stacks is refused meanwhile, even if the first caller left; the next one is answered."""

    streams: dict[int, Stream] = {}
    requests = StackRequests(lambda: streams)
    good = encode_stacks([READ])
    streams[1] = Stream(lambda asked: requests.answered(1, StackAnswer(id=asked.id, processes=good)))
    began, release = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def decode_slowly(data: bytes, node: str) -> list[ReadProcess]:
        loop.call_soon_threadsafe(began.set)
        assert release.wait(60)
        return decode_stacks(data, node)

    monkeypatch.setattr(stack_requests, "decode_stacks", decode_slowly)
    first = asyncio.create_task(requests.read({1: "n1"}, None, get_time))
    try:
        await asyncio.wait_for(began.wait(), 30)
        first.cancel()
        with suppress(asyncio.CancelledError):
            await first
        with pytest.raises(RefusedError, match="still answering another request for stacks") as refused:
            await requests.read({1: "n1"}, None, get_time)
    finally:
        release.set()
    assert 429 == refused.value.status
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
    answer = await requests.read({1: "n1"}, None, get_time)
    assert 1 == len(answer.groups)


async def test_a_caller_that_leaves_while_agents_are_asked_blocks_nobody() -> None:
    """Nothing runs for it any more."""

    requests = StackRequests(lambda: {1: Stream(None)})
    first = asyncio.create_task(requests.read({1: "n1"}, None, get_time))
    await asyncio.sleep(0)
    first.cancel()
    with suppress(asyncio.CancelledError):
        await first

    assert [] == (await requests.read({}, None, get_time)).unanswered


def fleet_of(*names: str) -> Fleet:
    """Nodes that reported once."""
    fleet = Fleet({}, {}, {})
    for number, name in enumerate(names, 1):
        fleet.member(StoredNode(number, name, name, f"{name}-id", 0.0, {}, {}), 0.0)
    return fleet


def test_the_nodes_of_a_job_are_asked() -> None:
    """Those that a scheduler gave it, and those where a process of it runs; named ones in any case."""

    fleet = fleet_of("n10", "n2", "n3")
    fleet.members[1].jobs["slurm:4711"] = Job("slurm:4711")
    fleet.members[2].processes[5] = ProcessIdentity(5, owner=Owner(job="slurm:4711"))
    fleet.members[3].processes[5] = ProcessIdentity(5, owner=Owner(job="slurm:47"))

    for job in ("4711", "slurm:4711"):
        assert {2: "n2", 1: "n10"} == find_nodes_to_ask(fleet, None, job)
    assert {3: "n3"} == find_nodes_to_ask(fleet, {3}, "4711")
    with pytest.raises(RefusedError, match="no node reports a process of job '471'"):
        find_nodes_to_ask(fleet, None, "471")
    with pytest.raises(RefusedError, match="the stacks of at most 256 nodes, not 300"):
        find_nodes_to_ask(fleet_of(*map(str, range(300))), set(range(1, 301)), None)


# --- the agent's side


class Reader(StackReader):
    """Reads what it is given."""

    def __init__(self, read: Callable[[int], ProcessStacks]) -> None:
        super().__init__(None)
        self._given = read

    def read(self, pid: int, clock: Callable[[], float]) -> ProcessStacks:  # noqa: ARG002
        """Return the stacks of a process."""
        return self._given(pid)


def node_frame() -> Frame:
    """A node with a process of a job on a GPU, its worker, and a process of somebody else."""
    owners = {100: Owner(job="slurm:1"), 200: Owner(job="slurm:2")}
    processes = [
        ProcessReading(ProcessIdentity(pid, 1, owner=owner), "R", {}, on_gpu=True)
        for pid, owner in owners.items()
    ]
    processes.append(ProcessReading(ProcessIdentity(101, 100), "R", {}, on_gpu=False))
    uses = tuple(GpuProcess(pid, "compute", None) for pid in owners)
    gpu = GpuReading(Device(0, "GPU-1", "NVIDIA H200"), {}, processes=uses)
    return Frame(1000.0, 1.0, Node("n"), gpus=(gpu,), processes=tuple(processes))


@pytest.mark.parametrize(
    ("job", "pids"), [("slurm:1", [100, 101]), ("2", [200]), ("", [100, 200, 101]), ("9", [])]
)
def test_an_agent_reads_the_processes_of_a_job(job: str, pids: list[int]) -> None:
    """Those on GPUs, then their workers; all without a job."""

    answers = StackAnswers(Reader(lambda pid: ProcessStacks(pid, 1000.0, (THREAD,))))

    answer = answers.answer(StackRequest(id=7, job=job), node_frame())

    assert (7, "") == (answer.id, answer.refusal)
    assert pids == [process.pid for process, _ in decode_stacks(answer.processes, "n1")]


def test_why_an_agent_has_no_stacks() -> None:
    """It has no frame yet, or has a bug."""

    def fail(_pid: int) -> ProcessStacks:
        raise LookupError("a bug")

    asked = StackRequest(id=7)
    broken = decode_stacks(StackAnswers(Reader(fail)).answer(asked, node_frame()).processes, "n1")
    assert {"a bug in gpulse: LookupError('a bug')"} == {
        str(found.problem and found.problem.reason) for _, found in broken
    }
    assert "this agent has not taken a sample yet" == StackAnswers(Reader(fail)).answer(asked, None).refusal


def test_a_read_that_hangs_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other processes are answered, and this one is named."""

    release = threading.Event()

    def hang(pid: int) -> ProcessStacks:
        if pid == 100:
            release.wait(600)
        return ProcessStacks(pid, 1000.0, (THREAD,))

    monkeypatch.setattr(line_collection, "ANSWER_SECONDS", 0.3)
    answers = StackAnswers(Reader(hang))
    try:
        answer = answers.answer(StackRequest(id=1), node_frame())
        again = answers.answer(StackRequest(id=2), node_frame())
        readers = [thread for thread in threading.enumerate() if thread.name.startswith("gpulse-stacks-")]
    finally:
        release.set()
    for reader in readers:
        reader.join(60)
    later = answers.answer(StackRequest(id=3), node_frame())

    found = {process.pid: stacks.problem for process, stacks in decode_stacks(answer.processes, "n1")}
    assert (None, None) == (found[200], found[101])
    assert StackProblem("failed", "the stacks could not be read in time") == found[100]
    assert (2, "this agent is still reading the stacks of 1 process for an earlier request") == (
        again.id,
        again.refusal,
    )
    assert (3, "") == (later.id, later.refusal)


def test_a_bug_in_an_agent_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head does not wait for it; the next request is answered as usual."""

    def fail(*_: object) -> list[StackProcess]:
        raise LookupError("x" * 100_000)

    answers = StackAnswers(Reader(lambda pid: ProcessStacks(pid, 1000.0, (THREAD,))))
    with monkeypatch.context() as patch:
        patch.setattr(line_collection, "list_processes", fail)
        broken = answers.answer(StackRequest(id=7), node_frame())

    assert 7 == broken.id
    assert broken.refusal.startswith("internal error (a bug in gpulse): LookupError('xxx")
    assert len(broken.refusal) <= MAX_CODE_TEXT_CHARS
    assert "" == answers.answer(StackRequest(id=8), node_frame()).refusal


def test_an_agent_answers_one_request_at_a_time() -> None:
    """Others are told so, and do not wait."""

    began, release = threading.Event(), threading.Event()

    def slow(pid: int) -> ProcessStacks:
        began.set()
        release.wait(60)
        return ProcessStacks(pid, 1000.0, (THREAD,))

    answers = StackAnswers(Reader(slow))
    first = threading.Thread(target=answers.answer, args=(StackRequest(id=1, job="2"), node_frame()))
    first.start()
    try:
        assert began.wait(60)
        assert "another request" in answers.answer(StackRequest(id=2), node_frame()).refusal
    finally:
        release.set()
        first.join(60)
