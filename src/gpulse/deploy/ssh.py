"""Talks to nodes with the system's ssh: the user's configuration, keys, agents and jump hosts; never a question asked."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from gpulse.deploy.nodes import NodeSpec
from gpulse.deploy.script import Letter
from gpulse.errors import GpulseError

FAILED = 255
"""The exit code of ssh when it is ssh itself that failed."""
_MOST_OUTPUT = 16 << 20
_CHUNK = 1 << 16
_GRACE_SECONDS = 1.0
_MOST_TRIES = 5
_FIRST_WAIT = 1.0
_HOST_NEVER = re.compile(r"""['`"$\\;&<>|(){}*?~!#\s]""")
"""No host is called so; ssh would put it into commands of the user's configuration (ProxyCommand, Match exec)."""
_USER_NEVER = re.compile(r"""['`"$;&<>|(){}*?~!#\s]|\\$""")
"""As for hosts, but some have a domain in front (`LAB\\ada`)."""


class NodeError(GpulseError):
    """A node that could not be reached, or could not do what was asked."""


class Ssh(NamedTuple):
    """How ssh is called."""

    config: str | None = None
    """A configuration file in place of the user's."""
    options: tuple[str, ...] = ()
    """As `ssh -o`."""
    connect_seconds: int = 10
    program: str = "ssh"
    is_new: bool = True
    """It knows the options that came with OpenSSH 8.7."""

    def command(self, node: NodeSpec, words: str) -> list[str]:
        """The command line. It holds nothing that others must not see."""
        given = [*(f"-o{option}" for option in self.options)]
        if self.config is not None:
            given += ["-F", self.config]
        if node.port is not None:
            given += ["-p", str(node.port)]
        if node.user is not None:
            given += ["-l", node.user]
        firmly = [*_FIRMLY, *(_FIRMLY_NEW if self.is_new else ())]
        # of an option that is given twice ssh takes the first
        return [self.program, "-T", "-a", "-x", *firmly, *given, *self._by_default(), "--", node.host, words]

    def _by_default(self) -> list[str]:
        return [
            f"-oConnectTimeout={self.connect_seconds}",
            "-oConnectionAttempts=1",
            "-oServerAliveInterval=5",
            "-oServerAliveCountMax=3",
            "-oControlMaster=no",
            "-oLogLevel=ERROR",
        ]


_FIRMLY = (
    "-oBatchMode=yes",
    "-oClearAllForwardings=yes",
    "-oRemoteCommand=none",
    "-oPermitLocalCommand=no",
)


_FIRMLY_NEW = ("-oStdinNull=no", "-oSessionType=default", "-oForkAfterAuthentication=no")
"""A configuration that says otherwise would keep the script from being read."""


def is_new_ssh(program: str = "ssh") -> bool:
    """Whether ssh knows the options that came with OpenSSH 8.7, as far as it says."""
    try:
        told = subprocess.run(  # noqa: S603  the program that is used anyway
            [program, "-V"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=5, check=False
        ).stderr
    except (OSError, subprocess.TimeoutExpired):
        return False
    version = re.search(r"OpenSSH_(?:for_Windows_)?(\d+)\.(\d+)", told)
    return version is not None and (int(version[1]), int(version[2])) >= (8, 7)


class Ended(NamedTuple):
    """How a connection ended."""

    code: int
    output: bytes
    errors: str


def check_destination(node: NodeSpec) -> None:
    """Refuse what no machine can be called, before any program sees it.

    Raises:
        NodeError: It could be taken for something else than a name.
    """
    if node.wrong is not None:
        raise NodeError(node.wrong, hint=f"correct {node.place}, or begin it with #")
    if _HOST_NEVER.search(node.host) or (node.user is not None and _USER_NEVER.search(node.user)):
        raise NodeError(
            "no machine can be called that; ssh was not asked", hint=f"correct {node.place or 'the name'}"
        )


async def converse(
    ssh: Ssh,
    node: NodeSpec,
    letter: Letter,
    *,
    seconds: float | None,
    heard: Callable[[bytes], None] | None = None,
) -> Ended:
    """Send a letter to a node and wait for the end of its answer.

    A connection that is closed before anybody could log in is tried again, a little later each time.

    Args:
        ssh: How.
        node: To whom.
        letter: What.
        seconds: How long it may take; None for ever, with standard input left open.
        heard: Told each piece of the output at once, which is then not kept.

    Raises:
        NodeError: It could not be reached, or took too long.
    """
    check_destination(node)
    try:
        async with asyncio.timeout(seconds):
            for number in range(_MOST_TRIES):
                ended = await _once(ssh, node, letter, heard, stay=seconds is None)
                if number + 1 == _MOST_TRIES or not _was_shut_out(ended):
                    break
                await asyncio.sleep(random.uniform(0.5, 1.0) * _FIRST_WAIT * 2**number)
    except TimeoutError as error:
        raise NodeError(
            f"no answer within {seconds:g} s",
            hint=f"see whether `ssh {node.destination} true` comes back; --timeout",
        ) from error
    if ended.code == FAILED:
        raise explained(ended.errors, node)
    return ended


def _was_shut_out(ended: Ended) -> bool:
    """Whether there were too many connections at once, so that nothing was heard of this one."""
    if ended.code != FAILED or ended.output:
        return False
    return next((sign for sign in _EXPLAINED if sign in ended.errors), None) in _SHUT_OUT


async def _once(
    ssh: Ssh, node: NodeSpec, letter: Letter, heard: Callable[[bytes], None] | None, *, stay: bool
) -> Ended:
    try:
        process = await asyncio.create_subprocess_exec(
            *ssh.command(node, letter.command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is ours to pass on, and there is no terminal to ask on
            limit=_CHUNK,
        )
    except OSError as error:
        raise NodeError(
            f"cannot start {ssh.program}: {error.strerror}", hint="install OpenSSH's client (openssh-client)"
        ) from error
    try:
        return await _talked(process, letter, heard, stay=stay)
    finally:
        await asyncio.shield(_end(process))


async def _talked(
    process: asyncio.subprocess.Process, letter: Letter, heard: Callable[[bytes], None] | None, *, stay: bool
) -> Ended:
    assert process.stdin is not None  # noqa: S101  pipes were asked for
    assert process.stdout is not None  # noqa: S101
    assert process.stderr is not None  # noqa: S101
    receiving = [
        asyncio.ensure_future(_received(process.stdout, heard)),
        asyncio.ensure_future(_received(process.stderr)),
    ]
    sending = asyncio.ensure_future(_send(process.stdin, letter, stay=stay))
    try:
        output, errors = await asyncio.gather(*receiving)
        code = await process.wait()
    finally:
        for task in (*receiving, sending):
            task.cancel()
        await asyncio.gather(*receiving, sending, return_exceptions=True)
    return Ended(code, output, errors.decode("utf-8", "replace"))


async def _send(stream: asyncio.StreamWriter, letter: Letter, *, stay: bool) -> None:
    """Send everything; a node that does not want it all hangs up, and says why elsewhere."""
    with suppress(BrokenPipeError, ConnectionResetError):
        for data in (letter.data, letter.rest):
            view = memoryview(data)
            for start in range(0, len(view), _CHUNK):
                stream.write(view[start : start + _CHUNK])
                await stream.drain()
        if stay:
            await asyncio.get_running_loop().create_future()
        stream.close()


async def _received(stream: asyncio.StreamReader, heard: Callable[[bytes], None] | None = None) -> bytes:
    """Everything that comes, as far as it can be kept."""
    kept = bytearray()
    while piece := await stream.read(_CHUNK):
        if heard is not None:
            heard(piece)
        elif len(kept) < _MOST_OUTPUT:
            kept += piece
    return bytes(kept)


async def _end(process: asyncio.subprocess.Process) -> None:
    """End it, with whatever it started (jump hosts), and wait until it is gone."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is not None:
            break
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_SECONDS):
                await process.wait()
    await process.wait()
    for stream in (process.stdout, process.stderr):  # what is left in the pipes, so that they close
        with suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_SECONDS):
                while stream is not None and await stream.read(_CHUNK):
                    pass
    if process.stdin is not None:
        process.stdin.close()
        with suppress(BrokenPipeError, ConnectionResetError):
            await process.stdin.wait_closed()


def explained(errors: str, node: NodeSpec) -> NodeError:
    """What ssh said, in words that say what to do."""
    place = node.destination
    port = "" if node.port is None else f"-p {node.port} "
    for sign, (message, hint) in _EXPLAINED.items():
        if sign in errors:
            known = {"place": place, "port": port, "host": node.host}
            return NodeError(message.format_map(known), hint=hint.format_map(known) if hint else None)
    told = [line.strip() for line in errors.splitlines() if line.strip()]
    reason = (told[-1] if told else "ssh failed and did not say why")[:300]
    return NodeError(reason.removeprefix("ssh: "), hint=f"see what `ssh -v {place}` says")


_MANY = "it closes connections before the login"
_FEWER = "its sshd or a jump host may take no more at once: --parallel 8, or MaxStartups in its sshd_config"
_EXPLAINED: Mapping[str, tuple[str, str | None]] = {
    "REMOTE HOST IDENTIFICATION HAS CHANGED": (
        "its host key is not the one that is known here, so it may be another machine",
        "if it was reinstalled: ssh-keygen -R {host}, then `ssh {place}` once",
    ),
    "Host key verification failed": (
        "its host key is not known here",
        "`ssh {place}` once and compare the key, or ssh-keyscan {port}{host} >> ~/.ssh/known_hosts on a network you trust",
    ),
    "Too many authentication failures": (
        "it refuses the login: too many keys were tried",
        "name one with IdentityFile and IdentitiesOnly in ~/.ssh/config",
    ),
    "Permission denied": (
        "it refuses the login",
        "make `ssh {place}` work without a password: ssh-copy-id {place}, or an agent (ssh-add)",
    ),
    "Connection refused": ("it refuses the connection", "is sshd running there, at that port?"),
    "timed out during banner exchange": (
        "it accepts connections and then says nothing",
        "is it overloaded, or is that port another service's?",
    ),
    "Connection timed out": (
        "it cannot be reached: no answer in time",
        "is it on, and is the address right?",
    ),
    "Could not resolve hostname": (
        "there is no machine of that name",
        "correct the name, or add it to ~/.ssh/config",
    ),
    "kex_exchange_identification": (_MANY, _FEWER),
    "Connection closed by UNKNOWN": (_MANY, _FEWER),
}
_SHUT_OUT = ("kex_exchange_identification", "Connection closed by UNKNOWN")
"""Of these a later attempt may come through; `UNKNOWN` is behind a jump host."""
