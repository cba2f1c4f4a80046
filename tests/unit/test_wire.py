"""Also run under every protobuf that agents may meet: see `make wirecheck`."""

from __future__ import annotations

import google.protobuf
import pytest

from gpulse.cluster import wire
from gpulse.cluster.wire_pb2 import (
    AgentMessage,
    Batch,
    Durable,
    Goodbye,
    HeadMessage,
    Hello,
    Layout,
    Reply,
    Request,
    Run,
    Settings,
    Welcome,
)

RUN = Run(id=b"\0" * wire.RUN_BYTES, first_kept=1, dropped=2, boot="b", ended_badly=True, lost_at_most=3)


@pytest.mark.parametrize(
    "message",
    [
        AgentMessage(
            hello=Hello(
                protocol=wire.PROTOCOL,
                version="1",
                host="gpu01",
                machine="m",
                boot="b",
                instance="i",
                pid=7,
                node=b"{}",
                labels={"rack": "7"},
                time_us=-1,
                monotonic_us=1 << 62,
                runs=[RUN],
                interval_ms=60_000,
            )
        ),
        AgentMessage(layout=Layout(text=b"{}")),
        AgentMessage(
            batch=Batch(run=b"r", first=1 << 63, count=3, sent_monotonic_us=5, frames=b"\xff", zipped=True)
        ),
        AgentMessage(goodbye=Goodbye()),
        AgentMessage(dropped=RUN),
        HeadMessage(
            welcome=Welcome(
                protocol=wire.PROTOCOL,
                version="1",
                head="h",
                node="gpu01#2",
                settings=Settings(interval_ms=500, bandwidth=True, nvlink=True),
                durable=[Durable(run=b"r", sequence=9)],
            )
        ),
        HeadMessage(durable=Durable(run=b"r", sequence=1)),
        HeadMessage(settings=Settings(interval_ms=100)),
        HeadMessage(warning="w"),
        Request(operation="start", body=b"{}"),
        Reply(status=409, body=b"{}"),
    ],
    ids=lambda message: (
        f"{type(message).__name__}.{getattr(message, 'WhichOneof', lambda _: '')('kind')}"
        if type(message).__name__.endswith("Message")
        else type(message).__name__
    ),
)
def test_every_message_survives_its_way(message: AgentMessage | HeadMessage | Request | Reply) -> None:
    """Under whatever protobuf is installed."""

    again = type(message).FromString(message.SerializeToString())

    assert again == message, google.protobuf.__version__


def test_a_field_of_a_newer_version_does_no_harm() -> None:
    """What is not known is passed over."""

    newer = Reply(status=200, body=b"x").SerializeToString() + b"\x9a\x06\x03abc"

    assert Reply.FromString(newer).body == b"x"


def test_the_calls_are_those_of_the_service() -> None:
    """Their names are all that stands between an agent and a head that never met."""

    assert {wire.STREAM, wire.CALL, wire.DOWNLOAD} == {
        f"/{wire.SERVICE}/{name}" for name in ("Stream", "Call", "Download")
    }
