"""Run the node script with the system's ssh, which uses the user's configuration, keys and jump hosts and never prompts.

The script (`node.sh`) runs in any POSIX shell, because every node has one. Before deploy can rely on Python on a node,
it must find one: the node's `gpulse`, a virtual environment, or the newest interpreter for `--push`. The shell can also
end an agent and remove its files when that Python is gone or too old (ARCHITECTURE.md has the figures). The script comes
on standard input, and answers with marked lines.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import secrets
import shlex
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from typing import NamedTuple

from gpulse.deploy.node_list import NodeError, NodeSpec, check_destination

SSH_FAILED_CODE = 255
"""Exit code of ssh when ssh itself failed."""
_MAX_OUTPUT_BYTES = 16 << 20
_CHUNK_BYTES = 1 << 16
_GRACE_SECONDS = 1.0
_MAX_TRIES = 5
_FIRST_WAIT_SECONDS = 1.0
_MARK = re.compile(r"[0-9a-f]{16}")
_VERB = re.compile(r"[a-z_]+")
_FILE_NAME = re.compile(r"[a-z]+(?:\.pem)?")
_PARAMETERS = (
    "gpulse",
    "venv",
    "python",
    "install",
    "interpreter",
    "wanted",
    "head",
    "slug",
    "target",
    "force",
    "keep",
    "bare",
    "lines",
    "follow",
    "spool",
    "patience",
)


class ScriptRequest(NamedTuple):
    """Everything that goes to a node in one connection."""

    command: str
    """Command for the login shell, whichever it is."""
    data: bytes
    """Data for its standard input."""
    mark: str
    """Starts each line of the answer; login scripts may print other lines."""
    rest: bytes = b""
    """Data that follows on standard input; many requests may share it."""


class ScriptAnswer(NamedTuple):
    """Answer of a node."""

    values: Mapping[str, Sequence[str]]
    is_complete: bool

    def first(self, key: str) -> str | None:
        """Return the first value of a key; None if there is none or it is empty."""
        values = self.values.get(key, ())
        return (values[0] or None) if values else None

    def number(self, key: str) -> int | None:
        """Return the first value of a key as a number; None if it is not one."""
        text = self.first(key)
        return int(text) if text is not None and re.fullmatch(r"[0-9]{1,18}", text) else None


def make_request(
    verb: str,
    parameters: Mapping[str, str | None],
    options: Sequence[str] = (),
    kept_files: Mapping[str, bytes] | None = None,
    rest: bytes = b"",
) -> ScriptRequest:
    """Build a request for the node script.

    Args:
        verb: A verb of the script.
        parameters: Parameters of the verb.
        options: Options of the agent.
        kept_files: Files that the node keeps, such as the token, by name.
        rest: Data that follows on standard input, to its end.
    """
    if not _VERB.fullmatch(verb) or not set(parameters) <= set(_PARAMETERS):
        raise ValueError(f"{verb} with {', '.join(parameters)} is not in the script")
    mark = secrets.token_hex(8)
    kept = kept_files or {}
    variables = {name: parameters.get(name) or "" for name in _PARAMETERS}
    variables |= {
        "mark": mark,
        "verb": verb,
        "files": " ".join(f"{_check_file_name(name)}:{len(kept[name])}" for name in kept),
    }
    lines = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    lines.append(" ".join(["set --", *map(shlex.quote, options)]))
    script = "\n".join([*lines, files("gpulse.deploy").joinpath("node.sh").read_text("utf-8")]).encode()
    # dd reads exactly the given number of bytes; shells read ahead. The command means the same in sh, csh and fish.
    command = f"exec sh -c 'eval \"$(dd bs=1 count={len(script)} 2>/dev/null)\"'"
    end = [mark.encode()] if verb == "up" else []  # without it the files did not all arrive
    return ScriptRequest(command, b"".join([script, *kept.values(), *end]), mark, rest)


def _check_file_name(name: str) -> str:
    if not _FILE_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a file name of the script")
    return name


def parse_answer(output: bytes, mark: str) -> ScriptAnswer:
    """Return the answer in an output: the lines that start with the mark."""
    if not _MARK.fullmatch(mark):
        raise ValueError(f"{mark!r} is not a mark")
    values: dict[str, list[str]] = {}
    is_complete = False
    for line in output.decode("utf-8", "replace").split("\n"):
        found, _, rest = line.partition(" ")
        if found == mark:
            key, _, value = rest.partition(" ")
            values.setdefault(key, []).append(value)
            is_complete = is_complete or key in ("end", "error")
    return ScriptAnswer(values, is_complete)


class SshConfig(NamedTuple):
    """How to run ssh."""

    config: str | None = None
    """Configuration file in place of the user's."""
    options: tuple[str, ...] = ()
    """Options as for `ssh -o`."""
    connect_seconds: int = 10
    program: str = "ssh"
    is_new: bool = True
    """Whether it supports the options of OpenSSH 8.7."""

    def command(self, node: NodeSpec, words: str) -> list[str]:
        """Return the command line. It must not contain secrets, because other users can see it."""
        given = [*(f"-o{option}" for option in self.options)]
        if self.config is not None:
            given += ["-F", self.config]
        if node.port is not None:
            given += ["-p", str(node.port)]
        if node.user is not None:
            given += ["-l", node.user]
        fixed = [*_FIXED_OPTIONS, *(_FIXED_OPTIONS_8_7 if self.is_new else ())]
        # ssh uses the first value of an option that is given twice
        return [self.program, "-T", "-a", "-x", *fixed, *given, *self._defaults(), "--", node.host, words]

    def _defaults(self) -> list[str]:
        return [
            f"-oConnectTimeout={self.connect_seconds}",
            "-oConnectionAttempts=1",
            "-oServerAliveInterval=5",
            "-oServerAliveCountMax=3",
            "-oControlMaster=no",
            "-oLogLevel=ERROR",
        ]


_FIXED_OPTIONS = (
    "-oBatchMode=yes",
    "-oClearAllForwardings=yes",
    "-oRemoteCommand=none",
    "-oPermitLocalCommand=no",
)


_FIXED_OPTIONS_8_7 = ("-oStdinNull=no", "-oSessionType=default", "-oForkAfterAuthentication=no")
"""With other values in the configuration, ssh would not read the script."""


def is_new_ssh(program: str = "ssh") -> bool:
    """Return whether ssh supports the options of OpenSSH 8.7, according to its version."""
    try:
        output = subprocess.run(  # noqa: S603  the program that is used anyway
            [program, "-V"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=5, check=False
        ).stderr
    except (OSError, subprocess.TimeoutExpired):
        return False
    version = re.search(r"OpenSSH_(?:for_Windows_)?(\d+)\.(\d+)", output)
    return version is not None and (int(version[1]), int(version[2])) >= (8, 7)


class SshResult(NamedTuple):
    """Result of one ssh connection."""

    code: int
    output: bytes
    errors: str


async def send_request(
    ssh: SshConfig,
    node: NodeSpec,
    request: ScriptRequest,
    *,
    seconds: float | None,
    receive: Callable[[bytes], None] | None = None,
) -> SshResult:
    """Send a request to a node and wait for the end of its answer.

    A connection that is closed before the login is tried again, with backoff.

    Args:
        ssh: How to run ssh.
        node: The node.
        request: The request.
        seconds: Time limit; None for no limit, with standard input left open.
        receive: Called with each piece of the output, which is then not kept.

    Raises:
        NodeError: The node cannot be reached, or took too long.
    """
    check_destination(node)
    try:
        async with asyncio.timeout(seconds):
            for number in range(_MAX_TRIES):
                ended = await _send_once(ssh, node, request, receive, stay=seconds is None)
                if number + 1 == _MAX_TRIES or not _was_rejected(ended):
                    break
                await asyncio.sleep(random.uniform(0.5, 1.0) * _FIRST_WAIT_SECONDS * 2**number)
    except TimeoutError as error:
        raise NodeError(
            f"the node did not answer within {seconds:g} s",
            hint=f"check that `ssh {node.destination} true` returns, or raise --timeout",
        ) from error
    if ended.code == SSH_FAILED_CODE:
        raise explain_failure(ended.errors, node)
    return ended


def _was_rejected(ended: SshResult) -> bool:
    """Return whether the connection was closed before the login, as sshd does when there are too many."""
    if ended.code != SSH_FAILED_CODE or ended.output:
        return False
    return next((sign for sign in _EXPLANATIONS if sign in ended.errors), None) in _REJECTED


async def _send_once(
    ssh: SshConfig,
    node: NodeSpec,
    request: ScriptRequest,
    receive: Callable[[bytes], None] | None,
    *,
    stay: bool,
) -> SshResult:
    try:
        process = await asyncio.create_subprocess_exec(
            *ssh.command(node, request.command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # this process forwards Ctrl-C, and there is no terminal to prompt on
            limit=_CHUNK_BYTES,
        )
    except OSError as error:
        raise NodeError(
            f"cannot start {ssh.program}: {error.strerror}", hint="install OpenSSH's client (openssh-client)"
        ) from error
    try:
        return await _communicate(process, request, receive, stay=stay)
    finally:
        await asyncio.shield(_end_process(process))


async def _communicate(
    process: asyncio.subprocess.Process,
    request: ScriptRequest,
    receive: Callable[[bytes], None] | None,
    *,
    stay: bool,
) -> SshResult:
    assert process.stdin is not None  # noqa: S101  pipes were asked for
    assert process.stdout is not None  # noqa: S101
    assert process.stderr is not None  # noqa: S101
    receiving = [
        asyncio.ensure_future(_receive(process.stdout, receive)),
        asyncio.ensure_future(_receive(process.stderr)),
    ]
    sending = asyncio.ensure_future(_write_request(process.stdin, request, stay=stay))
    try:
        output, errors = await asyncio.gather(*receiving)
        code = await process.wait()
    finally:
        for task in (*receiving, sending):
            task.cancel()
        await asyncio.gather(*receiving, sending, return_exceptions=True)
    return SshResult(code, output, errors.decode("utf-8", "replace"))


async def _write_request(stream: asyncio.StreamWriter, request: ScriptRequest, *, stay: bool) -> None:
    """Write the request; a node that closes the connection early says why in its answer."""
    with suppress(BrokenPipeError, ConnectionResetError):
        for data in (request.data, request.rest):
            view = memoryview(data)
            for start in range(0, len(view), _CHUNK_BYTES):
                stream.write(view[start : start + _CHUNK_BYTES])
                await stream.drain()
        if stay:
            await asyncio.get_running_loop().create_future()
        stream.close()


async def _receive(stream: asyncio.StreamReader, receive: Callable[[bytes], None] | None = None) -> bytes:
    """Read to the end; return the output up to the limit."""
    kept = bytearray()
    while piece := await stream.read(_CHUNK_BYTES):
        if receive is not None:
            receive(piece)
        elif len(kept) < _MAX_OUTPUT_BYTES:
            kept += piece
    return bytes(kept)


async def _end_process(process: asyncio.subprocess.Process) -> None:
    """End a process and its children (jump hosts), and wait for it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is not None:
            break
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_SECONDS):
                await process.wait()
    await process.wait()
    for stream in (process.stdout, process.stderr):  # drain the pipes, so that they close
        with suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_SECONDS):
                while stream is not None and await stream.read(_CHUNK_BYTES):
                    pass
    if process.stdin is not None:
        process.stdin.close()
        with suppress(BrokenPipeError, ConnectionResetError):
            await process.stdin.wait_closed()


def explain_failure(errors: str, node: NodeSpec) -> NodeError:
    """Turn the error output of ssh into an error that says what to do."""
    place = node.destination
    port = "" if node.port is None else f"-p {node.port} "
    for sign, (message, hint) in _EXPLANATIONS.items():
        if sign in errors:
            known = {"place": place, "port": port, "host": node.host}
            return NodeError(message.format_map(known), hint=hint.format_map(known) if hint else None)
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    reason = (lines[-1] if lines else "ssh failed without a message")[:300]
    return NodeError(reason.removeprefix("ssh: "), hint=f"see the output of `ssh -v {place}`")


_REJECTED_MESSAGE = "the node closed the connection before login"
_REJECTED_HINT = (
    "use --parallel 8; if the node or a jump host limits connections, raise MaxStartups in its sshd_config"
)
_EXPLANATIONS: Mapping[str, tuple[str, str | None]] = {
    "REMOTE HOST IDENTIFICATION HAS CHANGED": (
        "the node's host key has changed, so this may be another machine",
        "if the node was reinstalled: ssh-keygen -R {host}, then run `ssh {place}` once",
    ),
    "Host key verification failed": (
        "the node's host key is unknown",
        "run `ssh {place}` once and compare the key, or on a trusted network: ssh-keyscan {port}{host} >> ~/.ssh/known_hosts",
    ),
    "Too many authentication failures": (
        "the node refused the login: too many keys were tried",
        "choose one key with IdentityFile and IdentitiesOnly in ~/.ssh/config",
    ),
    "Permission denied": (
        "the node refused the login",
        "make `ssh {place}` work without a password: ssh-copy-id {place}, or use an ssh agent (ssh-add)",
    ),
    "Connection refused": (
        "the node refused the connection",
        "check that sshd is running on the node, on this port",
    ),
    "timed out during banner exchange": (
        "the node accepts connections but does not answer",
        "check that the node is not overloaded, and that sshd listens on this port",
    ),
    "Connection timed out": (
        "cannot reach the node: no answer in time",
        "check that the node is up, and that the address is right",
    ),
    "Could not resolve hostname": (
        "cannot resolve the host name",
        "correct the name, or add it to ~/.ssh/config",
    ),
    "kex_exchange_identification": (_REJECTED_MESSAGE, _REJECTED_HINT),
    "Connection closed by UNKNOWN": (_REJECTED_MESSAGE, _REJECTED_HINT),
}
_REJECTED = ("kex_exchange_identification", "Connection closed by UNKNOWN")
"""A later attempt may succeed; `UNKNOWN` is a node behind a jump host."""
