"""Receive layouts and batches of frames from agents: check, deduplicate, put on the head's clock, and add to the commit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from gpulse.cluster.head.connected_agents import EVENT_SECONDS, STREAM_SHARE, AgentStream
from gpulse.cluster.head.fleet import MAX_NODE_LAYOUT_BYTES, AgentRun, Fleet
from gpulse.cluster.head.group_commit import Committer, FactRecorder
from gpulse.cluster.head.message_decoder import (
    MAX_BATCH_FRAMES,
    CallRefusedError,
    DecodedBatch,
    check_batch_numbers,
    decode_frames,
    decode_layout,
    decompress,
    find_unknown_metrics,
    invalid_message,
)
from gpulse.cluster.protocol.load_limits import LoopShare
from gpulse.cluster.wire_pb2 import HeadMessage
from gpulse.model.message_limits import MAX_TIME_US
from gpulse.model.packed_columns import ColumnLayout, PackedFrame, layout_id
from gpulse.model.safe_text import printable
from gpulse.store.log.record_payloads import FrameBatch, FrameEvents, LogEntry

log = logging.getLogger(__name__)

_EVENTS_SHARE = 0.3
"""Part of the time of storing that the events of all agents may take together."""
_FEW_EVENTS = 64
"""An agent whose batch has at most this many does not wait for the events of others."""
_MIN_SKEW_SECONDS = 2.0
"""Smaller clock differences are ignored: the agent's own times are more exact than the delay of a message."""
_MIN_SKEW_CHANGE_SECONDS = 0.5
MAX_UNKNOWN_METRICS = 64
"""Maximum for all agents together; newer agents may have metrics that this version does not know."""
MAX_REFUSALS_REPORTED = 20
"""Maximum per connection."""
_MAX_REFUSED_LAYOUTS = 1000
"""An agent with more refused layouts is disconnected."""
_MAX_REASON_CHARS = 300


class LayoutsTooLargeError(CallRefusedError):
    """The layouts of a node would take too much memory."""

    def __init__(self) -> None:
        super().__init__(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"the column layouts of this node exceed the head's limit of {MAX_NODE_LAYOUT_BYTES >> 20} MiB per node",
        )


class FrameReceiver:
    """Receives layouts and frames."""

    def __init__(
        self,
        fleet: Fleet,
        facts: FactRecorder,
        committer: Callable[[], Committer],
        *,
        now: Callable[[], float],
    ) -> None:
        """Prepare to receive.

        Args:
            fleet: The nodes.
            facts: Writes facts and events.
            committer: Makes entries durable.
            now: The head's clock.
        """
        self._fleet = fleet
        self._facts = facts
        self._committer = committer
        self._now = now
        self._events_share = LoopShare(_EVENTS_SHARE)
        self.frames = 0
        """Number of frames received since the head started."""

    def receive_layout(self, stream: AgentStream, text: bytes) -> None:
        """Add a layout; a refused one loses its readings, but not the connection."""
        try:
            self._store_layout(stream.member.stored.id, text)
        except CallRefusedError as refusal:
            if len(stream.refused_layouts) >= _MAX_REFUSED_LAYOUTS:
                raise
            stream.refused_layouts.add(layout_id(text))
            is_full = isinstance(refusal, LayoutsTooLargeError)
            if is_full and stream.has_full_layouts:
                return  # it holds for every further layout
            stream.has_full_layouts |= is_full
            what = f"{refusal.reason}; samples with this layout are not stored"
            self._refuse(stream, "layout_refused", what, reason=refusal.reason)

    def _store_layout(self, node: int, text: bytes) -> None:
        name = layout_id(text)
        layout = self._fleet.layouts.get(name)
        if layout is None:
            layout = _decode_new_layout(self._fleet, node, text)
            self._facts.note("layout", id=str(name), text=layout.to_json().decode())
            self._fleet.add_layout(name, layout, node, len(text))
        if layout.scope == "gpu":
            self._facts.note("devices", node=node, layout=str(name), time=self._now())

    def _refuse(self, stream: AgentStream, kind: str, what: str, **detail: Any) -> None:
        """Report that something from an agent was refused: log it, record an event, and warn the agent, up to a limit."""
        stream.refusals += 1
        if stream.refusals > MAX_REFUSALS_REPORTED:
            return
        if stream.refusals == MAX_REFUSALS_REPORTED:
            what = f"{what}; further rejected data is not reported until the agent reconnects"
        log.warning("%s: %s", stream.member.name, what)
        self._facts.event(kind, stream.member.stored.id, **detail)
        stream.send_message(HeadMessage(warning=what))

    def receive_batch(self, stream: AgentStream, message: Any) -> None:
        """Check the frames of a batch, and add those that are new to the next commit.

        Raises:
            CallRefusedError: The batch is refused; the agent reconnects.
        """
        run = self._fleet.runs.get(message.run)
        if run is None or run.node != stream.member.stored.id:
            raise CallRefusedError(
                grpc.StatusCode.INVALID_ARGUMENT, "the frames belong to a run that was not announced"
            )
        first, sent_us = message.first, message.sent_monotonic_us
        check_batch_numbers(first, message.count, sent_us)
        now_us = round(self._now() * 1e6)
        stream.heard(now_us, sent_us)
        decoded = self._decoded(stream, run, message, now_us)
        frames, data = decoded.frames, decoded.data
        repeated = max(0, run.received - first + 1)
        if repeated:
            frames = frames[repeated:]
            data = b"".join(frame.to_bytes() for frame in frames)
            first += repeated
        if not frames:
            if run.received <= run.durable:
                stream.acknowledge(message.run, run.durable)
            return
        missing = first - 1 - max(run.received, run.other_head_last)
        if missing > 0:
            self._facts.event("gap", run.node, run=message.run.hex(), frames=missing, before=first)
        if decoded.refused or decoded.problems:
            self._report_refused(stream, message, decoded, repeated)
        shift_us = self._shift(stream, message.run, frames)
        batch = FrameBatch(message.run, run.node, first, len(frames), now_us, shift_us, data)
        member, stored_events = stream.member, []
        if decoded.frame_events:
            self._charge_events(stream, sum(map(len, decoded.frame_events.values())))
        for place, events in decoded.frame_events.items():
            if place >= repeated:
                frame = decoded.frames[place]
                moment = (frame.time_us + shift_us) / 1e6
                number = first + place - repeated
                stored_events.append(FrameEvents(run.node, batch.run, number, moment, frame.events))
                member.apply_events(events, moment)
        self._committer().add(LogEntry.of_batch(batch, tuple(stored_events), frames))
        run.received = batch.last
        if len(frames) > 1:
            slow = next((f for f in reversed(frames[:-1]) if len(f.blocks) > 2), None)
            if slow is not None:
                member.take(slow, self._fleet.layouts, shift_us)
        member.take(frames[-1], self._fleet.layouts, shift_us)
        self._fleet.used(frames, now_us / 1e6)
        self.frames += len(frames)

    def _charge_events(self, stream: AgentStream, count: int) -> None:
        """Let an agent wait for the time that storing its events takes; longer while many agents send many."""
        self._events_share.charge(count * EVENT_SECONDS)
        waiting = self._events_share.wait_seconds() * STREAM_SHARE if count > _FEW_EVENTS else 0.0
        stream.share.charge(max(waiting, count * EVENT_SECONDS))

    def _decoded(self, stream: AgentStream, run: AgentRun, message: Any, now_us: int) -> DecodedBatch:
        """Decode the frames of a batch; frames that are refused a second time are replaced by empty ones.

        An agent that is refused reconnects and resends the same frames with their layouts. If that does not help,
        nothing will, and the agent must be able to continue with the next frames.

        Raises:
            CallRefusedError: Some frames are invalid, for the first time.
        """
        is_again = run.refused_at == run.received
        try:
            data = decompress(message.frames) if message.zipped else message.frames
            decoded = decode_frames(
                data, message.count, self._fleet.shapes, stream.refused_layouts, now_us=now_us
            )
            if decoded.refused and not is_again:
                place, why = next(iter(decoded.refused.items()))
                raise invalid_message(f"frame {message.first + place} is invalid: {why}")
        except CallRefusedError as refusal:
            if not is_again or not 0 < message.count <= MAX_BATCH_FRAMES:
                run.refused_at = run.received
                raise
            empty = [PackedFrame(now_us, 0, ())] * message.count
            data = b"".join(frame.to_bytes() for frame in empty)
            decoded = DecodedBatch(empty, data, {}, [], dict.fromkeys(range(message.count), refusal.reason))
        return decoded

    def _report_refused(
        self, stream: AgentStream, message: Any, decoded: DecodedBatch, repeated: int
    ) -> None:
        """Report what of a batch is not stored."""
        about = {"run": message.run.hex(), "first": message.first}
        refused = {place: why for place, why in decoded.refused.items() if place >= repeated}
        if refused:
            why = next(iter(refused.values()))
            what = f"{len(refused)} frame{'' if len(refused) == 1 else 's'} not stored: {why}"
            self._refuse(stream, "frames_refused", what, **about, frames=len(refused), reason=why)
        if decoded.problems:
            count, why = len(decoded.problems), printable(decoded.problems[0], _MAX_REASON_CHARS)
            what = f"{count} event{'' if count == 1 else 's'} not stored: {why}"
            self._refuse(stream, "events_refused", what, **about, events=count, reason=why)

    def _shift(self, stream: AgentStream, run: bytes, frames: Sequence[PackedFrame]) -> int:
        """Return the shift that puts the times of these frames on the head's clock."""
        member = stream.member
        offset_us, shift_us = stream.clock_offset_us, member.shift_us
        frame = frames[-1]
        if offset_us is not None and frame.blocks and (stream.boots.get(run) or stream.boot) == stream.boot:
            off = frame.monotonic_us + offset_us - frame.time_us
            shift_us = off if abs(off) > _MIN_SKEW_SECONDS * 1e6 else 0
            if abs(shift_us - member.shift_us) <= _MIN_SKEW_CHANGE_SECONDS * 1e6:
                shift_us = member.shift_us
        if shift_us and not all(0 <= frame.time_us + shift_us <= MAX_TIME_US for frame in frames):
            return 0  # a clock with such times cannot be trusted
        if shift_us != member.shift_us:
            member.shift_us = shift_us
            seconds = round(-shift_us / 1e6, 3)
            self._facts.event("clock_skew", member.stored.id, seconds=seconds)
            log.warning("the clock of %s differs from the head's by %+.1f s", member.name, seconds)
        return shift_us


def _decode_new_layout(fleet: Fleet, node: int, text: bytes) -> ColumnLayout:
    """Decode a layout that the head does not have.

    Raises:
        CallRefusedError: It is invalid, the node has too many, or all agents together have too many unknown metrics, each of
            which would become a column of the history.
    """
    if not fleet.has_layout_room(node, len(text)):  # before the work of decoding it
        raise LayoutsTooLargeError
    layout = decode_layout(text)
    if not fleet.has_layout_room(node, len(text), len(layout.subjects)):
        raise LayoutsTooLargeError
    new = find_unknown_metrics(layout)
    if new:
        known = set().union(*map(find_unknown_metrics, fleet.layouts.values()))
        if len(known | new) > MAX_UNKNOWN_METRICS:
            raise invalid_message(
                f"a layout has metrics that this head does not know, such as {min(new)}, and the agents have sent "
                f"more than {MAX_UNKNOWN_METRICS} such metrics; install the same version of gpulse here and on the head"
            )
    return layout
