"""How agents and the head speak: versions, names of the calls, limits.

wire_pb2.py is made from wire.proto by grpcio-tools 1.64.3 (`make wire`). What newer ones make refuses to run beside
the protobuf that people's training environments pin; what this one makes runs on protobuf 4.25 to 7. The calls are
named here instead of in generated stubs for the same reason.
"""

from __future__ import annotations

PROTOCOL = 1
"""Grows when an older agent and a newer head, or the other way round, would misunderstand each other."""
STREAM = "/gpulse.v1.Head/Stream"
CALL = "/gpulse.v1.Head/Call"
DOWNLOAD = "/gpulse.v1.Head/Download"
SERVICE = "gpulse.v1.Head"
DEFAULT_PORT = 8090
DEFAULT_HTTP_PORT = 8091
MOST_MESSAGE_BYTES = 16 << 20
MOST_BATCH_BYTES = 8 << 20
"""The most that the frames of one batch may take, unzipped."""
RUN_BYTES = 16
RETELL_SECONDS = 600.0
"""A layout that an agent did not use for so long it tells again."""
FORGET_SECONDS = 3600.0
"""A layout that nobody used for so long a head forgets."""
TOKEN_KEY = "authorization"  # noqa: S105  the name of a header

_Options = list[tuple[str, int]]


def channel_options() -> _Options:
    """For whoever calls: a dead head is noticed within twenty seconds."""
    return [
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", MOST_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MOST_MESSAGE_BYTES),
        ("grpc.enable_retries", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 10_000),
        ("grpc.enable_http_proxy", 0),
    ]


def server_options() -> _Options:
    """For the head: agents may ping, a dead one is noticed, and a port belongs to one head."""
    return [
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_receive_message_length", MOST_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MOST_MESSAGE_BYTES),
        ("grpc.max_metadata_size", 16 << 10),
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", 10_000),
    ]
