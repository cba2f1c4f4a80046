"""Encode the stacks of a node's processes in an agent, decode them into bounded values at the head, and build the answer.

Heads and `gpulse stacks` give the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from gpulse.cluster.protocol import answers as a
from gpulse.diagnosis.stack_groups import MAX_PROCESSES, StackGroups, StackProcess, choose_threads
from gpulse.model.finding import CodeRole
from gpulse.model.message_limits import (
    MAX_FUNCTION_CHARS,
    bound_code_text,
    bound_name,
    bound_path,
    check_document,
)
from gpulse.model.python_stack import (
    ProcessStacks,
    StackFrame,
    StackProblem,
    StackProblemCode,
    ThreadStack,
)
from gpulse.model.time_text import format_iso
from gpulse.store.event_decoder import (
    JSON_ERRORS,
    CodeText,
    Count,
    EpochSeconds,
    FilePath,
    FunctionName,
    Pid,
    ShortText,
)

MAX_ANSWER_BYTES = 4 << 20
_MAX_THREADS = 32
_MAX_FRAMES = 128
_MAX_GPUS = 64

ReadProcess = tuple[StackProcess, ProcessStacks]
"""A process and its stacks, or why there are none."""


class _StackFramePayload(Struct, array_like=True):
    file: FilePath
    line: Count
    function: FunctionName
    short_file: Annotated[str, Meta(max_length=512)]


class _ThreadPayload(Struct):
    name: ShortText
    active: bool
    frames: Annotated[list[_StackFramePayload], Meta(min_length=1, max_length=_MAX_FRAMES)]
    thread_id: Count | None = None


class _StackProblemPayload(Struct):
    code: StackProblemCode
    reason: CodeText
    hint: CodeText | None = None


class _StackProcessPayload(Struct):
    pid: Pid
    role: CodeRole
    name: ShortText | None
    gpus: Annotated[list[ShortText], Meta(max_length=_MAX_GPUS)]
    time: EpochSeconds
    threads: Annotated[list[_ThreadPayload], Meta(max_length=_MAX_THREADS)] = []
    problem: _StackProblemPayload | None = None


_Processes = Annotated[list[_StackProcessPayload], Meta(max_length=MAX_PROCESSES)]
_DECODER = msgspec.json.Decoder(_Processes)


def encode_stacks(read: Sequence[ReadProcess]) -> bytes:
    """Return the stacks as JSON within the limits of heads.

    Threads that wait in library code are left out. If the rest is too large, only main threads are kept, then only the
    first processes.
    """
    processes = [_encoded(process, stacks) for process, stacks in read[:MAX_PROCESSES]]
    data = msgspec.json.encode(processes)
    if len(data) > MAX_ANSWER_BYTES:
        for process in processes:
            process.threads = process.threads[:1]
        data = msgspec.json.encode(processes)
    while len(data) > MAX_ANSWER_BYTES:
        processes = processes[: len(processes) // 2]
        data = msgspec.json.encode(processes)
    return data


def _encoded(process: StackProcess, stacks: ProcessStacks) -> _StackProcessPayload:
    problem = stacks.problem
    return _StackProcessPayload(
        pid=process.pid,
        role=process.role,
        name=None if process.name is None else bound_name(process.name),
        gpus=[bound_name(gpu) for gpu in process.gpus[:_MAX_GPUS]],
        time=stacks.time,
        threads=[_encoded_thread(each) for each in choose_threads(stacks)[:_MAX_THREADS] if each.frames],
        problem=None
        if problem is None
        else _StackProblemPayload(
            problem.code,
            bound_code_text(problem.reason),
            None if problem.hint is None else bound_code_text(problem.hint),
        ),
    )


def _encoded_thread(thread: ThreadStack) -> _ThreadPayload:
    frames = [
        _StackFramePayload(
            bound_path(frame.file),
            frame.line,
            bound_code_text(frame.function, MAX_FUNCTION_CHARS),
            bound_path(frame.short_file),
        )
        for frame in thread.frames[:_MAX_FRAMES]
    ]
    return _ThreadPayload(bound_name(thread.name), thread.is_active, frames, thread.thread_id)


def decode_stacks(data: bytes, node: str) -> list[ReadProcess]:
    """Return the stacks that an agent sent.

    Args:
        data: What it sent.
        node: Name of its node.

    Raises:
        ValueError: The data is not as an agent sends it, or exceeds a limit.
    """
    if len(data) > MAX_ANSWER_BYTES:
        raise ValueError(f"the stacks are larger than {MAX_ANSWER_BYTES >> 20} MiB")
    try:
        processes = _DECODER.decode(data)
        check_document(msgspec.to_builtins(processes))
    except JSON_ERRORS as error:
        raise ValueError(f"the stacks are not valid: {error}") from error
    return [_decoded(process, node) for process in processes]


def _decoded(process: _StackProcessPayload, node: str) -> ReadProcess:
    problem = process.problem
    if problem is None and not process.threads:
        problem = _StackProblemPayload("failed", "no stacks were read")
    threads = tuple(
        ThreadStack(
            thread.name,
            thread.thread_id,
            thread.active,
            tuple(StackFrame(*msgspec.structs.astuple(frame)) for frame in thread.frames),
        )
        for thread in process.threads
    )
    return (
        StackProcess(process.pid, process.role, process.name, tuple(process.gpus), node),
        ProcessStacks(
            process.pid,
            float(process.time),
            threads,
            None if problem is None else StackProblem(problem.code, problem.reason, problem.hint),
        ),
    )


def build_stacks(found: StackGroups, now: float, unanswered: Mapping[str, str] | None = None) -> a.Stacks:
    """Return the answer.

    Args:
        found: Groups of processes, and those without stacks.
        now: The time of the answer.
        unanswered: Why a node has no stacks, by its name.
    """
    return a.Stacks(
        time=format_iso(now),
        groups=[
            a.StackGroupAnswer(
                processes=[a.StackProcessAnswer(**process._asdict()) for process in group.processes],
                threads=[
                    a.ThreadStackAnswer(
                        name=thread.name,
                        active=thread.is_active,
                        frames=[a.StackFrameAnswer(**frame._asdict()) for frame in thread.frames],
                    )
                    for thread in group.threads
                ],
            )
            for group in found.groups
        ],
        problems=[
            a.StackProblemAnswer(**process._asdict(), code=problem.code, reason=problem.sentence)
            for process, problem in found.problems
        ],
        unanswered=[
            a.UnansweredNode(node=node, reason=reason) for node, reason in (unanswered or {}).items()
        ],
    )
