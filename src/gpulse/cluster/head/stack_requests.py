"""Ask agents for the stacks of their processes, and wait for the answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from gpulse.cluster.head.fleet import Fleet, FleetMember
from gpulse.cluster.protocol.answers import Stacks
from gpulse.cluster.protocol.stack_codec import ReadProcess, build_stacks, decode_stacks
from gpulse.cluster.wire_pb2 import HeadMessage, StackAnswer, StackRequest
from gpulse.diagnosis.stack_groups import group_stacks, is_job
from gpulse.errors import RefusedError
from gpulse.model.message_limits import MAX_CODE_TEXT_CHARS
from gpulse.model.safe_text import natural_key, printable

ANSWER_SECONDS = 10.0
"""An agent that has not answered by then is named as missing."""
MAX_NODES = 256
"""Number of nodes that one request may be about."""
MAX_TOTAL_BYTES = 32 << 20
"""Size of all answers to one request; nodes that answer later are named as missing."""


class StackStream(Protocol):
    """The connection to an agent."""

    answers_stacks: bool
    """Whether the agent answers such requests; older versions ignore them."""

    def send_message(self, message: HeadMessage) -> None:
        """Send a message to the agent."""


class NodeAnswer(NamedTuple):
    """The answer of one node as it arrived, or why there is none."""

    node: str
    data: bytes = b""
    refusal: str | None = None


class StackRequests:
    """Requests for stacks that agents have not answered yet; one at a time, because answers are large."""

    def __init__(self, streams: Callable[[], Mapping[int, StackStream]]) -> None:
        """Prepare to ask.

        Args:
            streams: Returns the connected agents by node ID.
        """
        self._streams = streams
        self._numbers = itertools.count(1)
        self._is_busy = False
        self._left_bytes = 0
        """Size that further answers to the current request may have."""
        self._waiting: dict[tuple[int, int], asyncio.Future[NodeAnswer]] = {}
        """By number of the request and node ID."""

    async def read(self, nodes: Mapping[int, str], job: str | None, clock: Callable[[], float]) -> Stacks:
        """Ask agents for the stacks of a job, or of all processes on their GPUs; every node is in the answer.

        Args:
            nodes: Names of the nodes by ID.
            job: Only this job.
            clock: Returns the time in epoch seconds.

        Raises:
            RefusedError: Another request is being answered.
        """
        if self._is_busy:
            raise RefusedError(
                429,
                "the head is still answering another request for stacks",
                hint=f"try again in {ANSWER_SECONDS:g} s",
            )
        self._is_busy = True
        try:
            found = await self._ask(nodes, job)
        except BaseException:
            self._is_busy = False
            raise
        # A caller that leaves does not end the thread, so the next request still waits for it.
        work = asyncio.ensure_future(asyncio.to_thread(_build, found, job, clock()))
        work.add_done_callback(self._finish)
        return await asyncio.shield(work)

    def _finish(self, _work: asyncio.Future[Stacks]) -> None:
        self._is_busy = False

    async def _ask(self, nodes: Mapping[int, str], job: str | None) -> list[NodeAnswer]:
        number, streams = next(self._numbers), self._streams()
        self._left_bytes = MAX_TOTAL_BYTES
        request = HeadMessage(stacks=StackRequest(id=number, job=job or ""))
        futures: dict[int, asyncio.Future[NodeAnswer]] = {}
        for node in nodes:
            stream = streams.get(node)
            if stream is not None and stream.answers_stacks:
                futures[node] = asyncio.get_running_loop().create_future()
                self._waiting[number, node] = futures[node]
                stream.send_message(request)
        try:
            if futures:
                await asyncio.wait(futures.values(), timeout=ANSWER_SECONDS)
        finally:
            for node in futures:
                self._waiting.pop((number, node), None)
        return [
            _outcome(name, futures[node])
            if node in futures
            else NodeAnswer(name, refusal=_explain_silence(streams.get(node)))
            for node, name in nodes.items()
        ]

    def answered(self, node: int, answer: StackAnswer) -> None:
        """Take an agent's answer; one that nobody waits for any more is ignored."""
        future = self._waiting.get((answer.id, node))
        if future is None or future.done():
            return
        size = len(answer.processes)
        if answer.refusal:
            future.set_result(NodeAnswer("", refusal=printable(answer.refusal, MAX_CODE_TEXT_CHARS)))
        elif size > self._left_bytes:
            reason = f"the stacks of all nodes together are larger than {MAX_TOTAL_BYTES >> 20} MiB; name fewer nodes"
            future.set_result(NodeAnswer("", refusal=reason))
        else:
            self._left_bytes -= size
            future.set_result(NodeAnswer("", answer.processes))

    def disconnected(self, node: int) -> None:
        """Stop waiting for a node whose agent has disconnected."""
        for (_, other), future in self._waiting.items():
            if other == node and not future.done():
                future.set_result(NodeAnswer("", refusal="the agent disconnected before it answered"))


def _outcome(name: str, future: asyncio.Future[NodeAnswer]) -> NodeAnswer:
    if not future.done():
        return NodeAnswer(name, refusal=f"the agent did not answer within {ANSWER_SECONDS:g} s")
    return future.result()._replace(node=name)


def _build(answers: Sequence[NodeAnswer], job: str | None, now: float) -> Stacks:
    """Decode the answers of all nodes, and put equal stacks together; this takes a while."""
    read: list[ReadProcess] = []
    unanswered: dict[str, str] = {}
    for answer in answers:
        reason = answer.refusal
        if reason is None:
            try:
                found = decode_stacks(answer.data, answer.node)
            except ValueError as error:
                reason = printable(f"cannot use the agent's answer: {error}", MAX_CODE_TEXT_CHARS)
            else:
                read += found
                reason = None if found else _explain_idle(job)
        if reason is not None:
            unanswered[answer.node] = reason
    return build_stacks(group_stacks(read), now, unanswered)


def _explain_idle(job: str | None) -> str:
    process = "no process" if job is None else f"no process of job {job[:100]}"
    return f"{process} uses a GPU there"


def find_nodes_to_ask(fleet: Fleet, named: Collection[int] | None, job: str | None) -> dict[int, str]:
    """Return the names of the nodes whose agents are asked, by ID.

    Args:
        fleet: All nodes.
        named: IDs of the nodes that the request names; None for those where the job runs.
        job: The job.

    Raises:
        RefusedError: No node reports the job, or the nodes are too many.
    """
    members = [member for number, member in fleet.members.items() if named is None or number in named]
    if named is None and job is not None:
        members = [member for member in members if _runs_job(member, job)]
        if not members:
            raise RefusedError(
                404,
                f"no node reports a process of job {job[:100]!r}",
                hint="check the job's ID, or name a node; only running jobs have stacks",
            )
    if len(members) > MAX_NODES:
        raise RefusedError(
            400,
            f"one request can read the stacks of at most {MAX_NODES} nodes, not {len(members)}",
            hint="name fewer nodes",
        )
    members.sort(key=lambda member: natural_key(member.name))
    return {member.stored.id: member.name for member in members}


def _runs_job(member: FleetMember, job: str) -> bool:
    """Return whether a node has a job, or a process of it."""
    known = {*member.jobs, *(identity.owner.job for identity in member.processes.values())}
    return any(each is not None and is_job(each, job) for each in known)


def _explain_silence(stream: StackStream | None) -> str:
    if stream is None:
        return "the agent is not connected to this head"
    return "the agent is older than this head and cannot read stacks"
