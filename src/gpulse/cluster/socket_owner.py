"""Find the owner of a local TCP socket: the user at the other end of a connection, the process that listens on a port."""

from __future__ import annotations

import os
import pwd
import socket
import struct
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

from gpulse.model.safe_text import printable

_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_REQUEST, _DUMP = 0x1, 0x300
_HEADER = struct.Struct("=IHHII")
_ANY = 0xFFFFFFFF
_MAX_ANSWER_BYTES = 1 << 16
_ANSWER_SECONDS = 1.0
_ESTABLISHED, _FIN_WAIT_1, _FIN_WAIT_2 = 1, 4, 5
_STATES = frozenset({_ESTABLISHED, _FIN_WAIT_1, _FIN_WAIT_2})
"""States of the client's socket while the server still reads from it. A socket that is only being opened (SYN_SENT) may
have the addresses of one that ended."""
_MAPPED = b"\0" * 10 + b"\xff\xff"
_LISTENING = "0A"


class _TcpSocket(NamedTuple):
    """One socket of this machine."""

    local: tuple[bytes, int]
    remote: tuple[bytes, int]
    state: int
    uid: int
    inode: int
    """0 once no process holds the socket: the kernel then reports root as its user."""


def find_connection_owner(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """Return the user ID of the process that opened a connection to this process; None if it cannot be found.

    Call it while the connection is open. The result is None for a client on another machine or in another network
    namespace, and for a socket that its process has closed.

    Args:
        client: Address and port of the client, as the server sees them.
        server: Address and port that the client connected to.
    """
    return _find_owner(client, (server[1],), server[0])


def find_port_owner(client: tuple[str, int], server_ports: Collection[int]) -> int | None:
    """Return the same for a connection whose server address is unknown.

    All connections from the client's address and port to one of the ports are examined; the result is None if they
    belong to different users.
    """
    return _find_owner(client, server_ports, None)


def _find_owner(client: tuple[str, int], ports: Collection[int], server_host: str | None) -> int | None:
    try:
        local = (_pack_address(client[0]), client[1])
        host = None if server_host is None else _pack_address(server_host)
        found: list[_TcpSocket] = []
        with suppress(OSError, struct.error):
            found = _filter_sockets(_from_netlink(local, ports, host), local, ports, host)
        if not found:  # a kernel without sock_diag, or a sandbox that forbids it
            found = _filter_sockets(_from_proc(local[1]), local, ports, host)
        users = {each.uid if each.inode and each.state in _STATES else None for each in found}
        owner = users.pop() if len(users) == 1 else None
        return None if owner is None or _is_anonymous(owner) else owner
    except (OSError, ValueError, IndexError):
        return None


def _filter_sockets(
    sockets: Iterable[_TcpSocket], local: tuple[bytes, int], ports: Collection[int], host: bytes | None
) -> list[_TcpSocket]:
    return [
        each
        for each in sockets
        if each.local == local and each.remote[1] in ports and host in (None, each.remote[0])
    ]


def _pack_address(address: str) -> bytes:
    """Return an address as 4 bytes, or as 16 if it is IPv6 and not mapped IPv4."""
    text = address.partition("%")[0]
    if ":" not in text:
        return socket.inet_pton(socket.AF_INET, text)
    return _unmap_ipv4(socket.inet_pton(socket.AF_INET6, text))


def _unmap_ipv4(address: bytes) -> bytes:
    return address[12:] if address.startswith(_MAPPED) else address


def _is_anonymous(uid: int) -> bool:
    """Return whether a user ID stands for all users that are not mapped in this user namespace."""
    with open("/proc/sys/kernel/overflowuid", encoding="ascii") as file:
        if uid != int(file.read()):
            return False
    with open("/proc/self/uid_map", encoding="ascii") as file:
        return file.read().split() != ["0", "0", str(_ANY)]


def _from_netlink(
    local: tuple[bytes, int], ports: Collection[int], host: bytes | None
) -> Iterator[_TcpSocket]:
    """Query the kernel for one connection if both of its ends are known, else for all from this local port.

    Looking up one takes 50 µs, however many connections there are; listing all of them takes a millisecond.
    """
    is_v4 = len(local[0]) == 4
    if host is not None and len(host) == len(local[0]):
        endpoints = struct.pack("!HH16s16s", local[1], *ports, local[0], host)
        yield from _query_kernel(socket.AF_INET if is_v4 else socket.AF_INET6, endpoints, _REQUEST)
        return
    endpoints = struct.pack("!HH32x", local[1], 0)
    for family in (socket.AF_INET, socket.AF_INET6) if is_v4 else (socket.AF_INET6,):
        yield from _query_kernel(
            family, endpoints, _REQUEST | _DUMP
        )  # IPv6 sockets carry mapped IPv4 as well


def _query_kernel(family: int, endpoints: bytes, flags: int) -> Iterator[_TcpSocket]:
    body = (
        struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 0, _ANY)
        + endpoints
        + struct.pack("=III", 0, _ANY, _ANY)
    )
    request = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, flags, 1, 0) + body
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as kernel:
        kernel.settimeout(_ANSWER_SECONDS)
        kernel.sendto(request, (0, 0))
        while True:
            answer = kernel.recv(_MAX_ANSWER_BYTES)
            while answer:
                length, kind = _HEADER.unpack_from(answer)[:2]
                if kind in {_NLMSG_ERROR, _NLMSG_DONE} or length < _HEADER.size:
                    return
                yield _parse_message(answer[_HEADER.size : length])
                if not flags & _DUMP:
                    return
                answer = answer[(length + 3) & ~3 :]


def _parse_message(message: bytes) -> _TcpSocket:
    """Parse a `struct inet_diag_msg`."""
    family, state = message[0], message[1]
    local_port, remote_port, local, remote = struct.unpack_from("!HH16s16s", message, 4)
    uid, inode = struct.unpack_from("=II", message, 64)
    size = 4 if family == socket.AF_INET else 16
    return _TcpSocket(
        (_unmap_ipv4(local[:size]), local_port), (_unmap_ipv4(remote[:size]), remote_port), state, uid, inode
    )


def _from_proc(port: int) -> Iterator[_TcpSocket]:
    """Read the sockets with a local port from /proc, which takes milliseconds if there are thousands."""
    mark = f":{port:04X} "
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(FileNotFoundError), open(table, encoding="ascii") as file:
            next(file, None)
            for parts in (line.split() for line in file if mark in line):
                yield _TcpSocket(
                    _endpoint(parts[1]), _endpoint(parts[2]), int(parts[3], 16), int(parts[7]), int(parts[9])
                )


def _endpoint(text: str) -> tuple[bytes, int]:
    """Parse `0100007F:1F9A`: 32-bit words in the machine's byte order."""
    address, _, port = text.partition(":")
    words = [int(address[start : start + 8], 16) for start in range(0, len(address), 8)]
    return _unmap_ipv4(struct.pack(f"={len(words)}I", *words)), int(port, 16)


def describe_listener(port: int) -> str | None:
    """Return the process that listens on a TCP port, such as `python3 (pid 4711)`; None if there is none.

    Of another user's process only the user can be found.
    """
    sockets = dict(_listening_sockets(port))
    if not sockets:
        return None
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        if any(inode in sockets for inode in _socket_inodes(pid)):
            return f"{_program_name(pid)} (pid {pid})"
    return f"a process of {_user_name(next(iter(sockets.values())))}"


def _listening_sockets(port: int) -> Iterator[tuple[str, int]]:
    """Yield the inode and the user ID of every socket that listens on a port."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError), open(table, encoding="ascii") as file:
            next(file, None)
            for line in file:
                parts = line.split()
                if parts[3] == _LISTENING and int(parts[1].rpartition(":")[2], 16) == port:
                    yield parts[9], int(parts[7])


def _socket_inodes(pid: str) -> Iterator[str]:
    with suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                if target.startswith("socket:["):
                    yield target[8:-1]


def _program_name(pid: str) -> str:
    with suppress(OSError), open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
        return printable(file.read().strip()) or "a process"
    return "a process"


def _user_name(uid: int) -> str:
    with suppress(KeyError):
        return f"the user {pwd.getpwuid(uid).pw_name}"
    return f"the user {uid}"
