"""Constants of the wire protocol between agents, clients and the head: version, call names, limits.

wire_pb2.py is generated from wire.proto by grpcio-tools 1.64.3 (`make wire`). The code of newer versions does not run
with the protobuf versions that training environments pin; this code runs with protobuf 4.25 to 7. The calls are named
here instead of in generated stubs for the same reason.
"""

from __future__ import annotations

PROTOCOL = 1
"""Incremented when agents and heads of different versions are no longer compatible."""
STREAM = "/gpulse.v1.Head/Stream"
CALL = "/gpulse.v1.Head/Call"
DOWNLOAD = "/gpulse.v1.Head/Download"
SERVICE = "gpulse.v1.Head"
DEFAULT_PORT = 8090
DEFAULT_HTTP_PORT = 8091
MAX_MESSAGE_BYTES = 16 << 20
MAX_BATCH_BYTES = 8 << 20
"""Maximum uncompressed size of the frames of one batch."""
RUN_BYTES = 16
LAYOUT_RESEND_SECONDS = 600.0
"""An agent sends a layout again if it has not used it for this long."""
LAYOUT_EXPIRY_SECONDS = 1200.0
"""A head forgets a layout that has not been used for this long."""
TOKEN_KEY = "authorization"  # noqa: S105  the name of a header

_Options = list[tuple[str, int]]


def channel_options() -> _Options:
    """Return the channel options of clients: a dead head is detected within 20 seconds."""
    return [
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.enable_retries", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 10_000),
        ("grpc.enable_http_proxy", 0),
    ]


def server_options() -> _Options:
    """Return the server options of a head: agents may ping, dead ones are detected, and ports are not shared."""
    return [
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_metadata_size", 16 << 10),
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", 10_000),
        ("grpc.http2.bdp_probe", 0),  # it would answer each frame with a ping
        ("grpc.http2.lookahead_bytes", 256 << 10),
    ]
