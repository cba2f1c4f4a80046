"""Run a deploy command on many nodes in parallel; a failure on one node does not affect the others."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from gpulse._version import __version__
from gpulse.cluster.agent.identity import state_directory_name
from gpulse.cluster.client.transport import parse_agent_addresses
from gpulse.deploy.node_list import NodeError, NodeSpec
from gpulse.deploy.ssh import ScriptAnswer, ScriptRequest, SshConfig, make_request, parse_answer, send_request
from gpulse.deploy.wheelhouse import (
    Platform,
    ProgramRunner,
    Wheelhouse,
    make_packed_wheelhouse,
    parse_platform,
)
from gpulse.errors import GpulseError, UsageError
from gpulse.model.device import SSH_LABEL
from gpulse.model.session import MAX_LABEL_CHARS, MAX_LABELS

DeployVerb = Literal["up", "restart", "down", "status", "purge"]
NodeTask = Callable[[NodeSpec], Awaitable["NodeOutcome"]]

RESERVED_OPTIONS = frozenset({"--background", "--log-file", "--state-dir", "--token-file", "--node-name"})
"""Agent options that deploy sets itself."""
_MAX_REASON_CHARACTERS = 300
_CREDENTIAL_HINT = "give the head's token with --token-file FILE; deploy copies it to the nodes"
_MAX_LINE_BYTES = 1 << 16
_MAX_LOG_BYTES = 16 << 20
"""Maximum size of one node's log, unless it is followed."""
_MAX_ANSWER_BYTES = 1 << 20


class DeployOrder(NamedTuple):
    """What to do on every node."""

    verb: DeployVerb
    head: str | None = None
    """Head for nodes that do not name their own."""
    options: tuple[str, ...] = ()
    """Options of the agents."""
    files: Mapping[str, bytes] = {}
    """Files for the agents: `token`, `ca.pem`, `cert.pem`, `key.pem`."""
    python: str | None = None
    """Python interpreter for nodes that do not name their own."""
    push: bool = False
    keep: bool = False
    """With `restart`: agents keep their head, options, token and certificates."""
    without_token: bool = False
    """Remove an agent's token if none is sent."""
    spool: bool = False
    """With `purge`: also delete frames that may not have reached a head."""


class NodeOutcome(NamedTuple):
    """Result of a deploy command on one node."""

    node: NodeSpec
    seconds: float
    did: str | None = None
    error: str | None = None
    """Why it failed; None if it did not."""
    hint: str | None = None
    state: str | None = None
    """`running`, `stopped`, `ended` (without a stop command) or `absent`."""
    hostname: str | None = None
    """The node's own host name."""
    pid: int | None = None
    since: int | None = None
    """When the agent was started, by the node's clock."""
    how: str | None = None
    """`session` (a separate process session) or `systemd`."""
    version: str | None = None
    head: str | None = None
    link: str | None = None
    """The agent's connection to its head, according to its log."""
    notes: tuple[str, ...] = ()
    pushed: bool = False
    heard: str | None = None
    """The node's state according to its head, if the head was queried."""

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        fields = self._asdict()
        node = fields.pop("node")
        return {
            "node": node.title,
            "host": node.host,
            "ok": self.error is None,
            **fields,
            "notes": list(self.notes),
        }


def choose_head(node: NodeSpec, order: DeployOrder) -> str:
    """Return the head of a node's agent.

    Raises:
        UsageError: No head is named, or its address is not one that an agent can use.
    """
    head = node.head or order.head
    if head is None:
        raise UsageError(
            f"no head is given for {node.title}",
            hint="add --head HOST:8090, the address at which the nodes can reach the head",
        )
    parse_agent_addresses(head)
    return head


def head_slug(head: str) -> str:
    """Return the path component that separates the state for one head from that for others."""
    return state_directory_name([address.target for address in parse_agent_addresses(head)])


def build_agent_options(node: NodeSpec, order: DeployOrder) -> list[str]:
    """Return the options of one node's agent.

    Raises:
        UsageError: They hold too many labels.
    """
    options = list(order.options)
    if node.name is not None:
        options += ["--node-name", node.name]
    labels = {SSH_LABEL: node.reached[:MAX_LABEL_CHARS], **node.labels}
    for key, value in sorted(labels.items()):
        options += ["--label", f"{key}={value}"]
    count = sum(option == "--label" or option.startswith("--label=") for option in options)
    if count > MAX_LABELS:
        raise UsageError(
            f"{count} labels are too many",
            hint=f"give at most {MAX_LABELS - 1}, because deploy adds one itself",
        )
    return options


class WheelhouseCache:
    """Builds the wheelhouse of each platform once, when the first node needs it."""

    def __init__(self, prepared: Wheelhouse | None = None) -> None:
        """Start empty.

        Args:
            prepared: An existing wheelhouse to use for all nodes.
        """
        self._prepared = prepared
        self._made: dict[Platform, asyncio.Task[Wheelhouse]] = {}
        self._programs = ProgramRunner()

    async def get(self, platform: Platform) -> Wheelhouse:
        """Return the wheels for a platform.

        Raises:
            GpulseError: Some wheels are not available.
        """
        if self._prepared is not None:
            return self._prepared
        if platform not in self._made:
            self._made[platform] = asyncio.create_task(
                asyncio.to_thread(make_packed_wheelhouse, platform, self._programs)
            )
        return await asyncio.shield(self._made[platform])

    async def close(self) -> None:
        """Cancel the wheelhouses that are being built."""
        self._programs.close()
        await asyncio.gather(*self._made.values(), return_exceptions=True)


class Deployment:
    """Runs one deploy command on nodes."""

    def __init__(
        self, ssh: SshConfig, order: DeployOrder, wheels: WheelhouseCache, *, seconds: float
    ) -> None:
        """Prepare for the first node.

        Args:
            ssh: The ssh configuration.
            order: The command.
            wheels: Builds wheelhouses.
            seconds: Time limit per node.
        """
        self._ssh = ssh
        self._order = order
        self._wheels = wheels
        self._seconds = seconds

    async def run(self, node: NodeSpec) -> NodeOutcome:
        """Run the command on one node; any failure becomes its outcome."""
        began = time.monotonic()
        try:
            work = _NodeDeployment(self._ssh, node, self._order, self._wheels, began + self._seconds)
            outcome = await work.run()
        except GpulseError as error:
            outcome = NodeOutcome(node, 0.0, error=error.message, hint=error.hint)
        except Exception as error:  # noqa: BLE001  a failure on one node must not stop the others
            outcome = NodeOutcome(node, 0.0, error=f"a bug in gpulse: {error!r}"[:_MAX_REASON_CHARACTERS])
        return outcome._replace(seconds=round(time.monotonic() - began, 3))


class _NodeDeployment:
    """The ssh connections to one node that a command needs, with a common deadline."""

    def __init__(
        self, ssh: SshConfig, node: NodeSpec, order: DeployOrder, wheels: WheelhouseCache, deadline: float
    ) -> None:
        self._ssh, self._node, self._order, self._wheels = ssh, node, order, wheels
        self._deadline = deadline

    async def run(self) -> NodeOutcome:
        match self._order.verb:
            case "up" | "restart":
                return await self._up()
            case "purge":
                spool = "yes" if self._order.spool else None
                answer = await self._ask(make_request("purge", {"spool": spool, "slug": self._slug()}))
            case verb:
                answer = await self._ask(make_request(verb, {"slug": self._slug()}))
        return self._outcome(answer)

    def _slug(self) -> str | None:
        """Return the slug that selects the agents of one head; None for all agents."""
        return None if self._order.head is None else head_slug(choose_head(self._node, self._order))

    async def _up(self) -> NodeOutcome:
        node, order = self._node, self._order
        parameters = {"gpulse": node.gpulse, "venv": node.venv, "python": node.python or order.python}
        parameters |= {
            "force": "yes" if order.verb == "restart" else None,
            "keep": "yes" if order.keep else None,
            "bare": "yes" if order.without_token else None,
        }
        if not order.keep or order.head or node.head:
            head = choose_head(node, order)
            targets = ",".join(address.target for address in parse_agent_addresses(head))
            parameters |= {"head": head, "slug": head_slug(head), "target": targets}
        pushed = False
        if order.push and node.gpulse is None and node.venv is None:
            parameters["install"], pushed = await self._push(parameters["python"])
        answer = await self._ask(
            make_request("up", parameters, build_agent_options(node, order), order.files)
        )
        return self._outcome(answer, pushed=pushed)

    async def _push(self, python: str | None) -> tuple[str, bool]:
        """Install a copy of gpulse if it is missing; return its name and whether it was sent."""
        probed = await self._ask(make_request("probe", {"python": python}))
        platform = parse_platform(probed.first("facts") or "")
        try:
            async with asyncio.timeout(self._left()):
                wheels = await self._wheels.get(platform)
        except TimeoutError as error:
            raise NodeError(
                "building the wheels for this node took too long", hint="--timeout 1800"
            ) from error
        python = probed.first("python")
        interpreter = hashlib.sha256((probed.first("real") or python or "").encode()).hexdigest()[:8]
        install = (
            f"{wheels.key}-{platform.text}-{interpreter}"  # virtual environments depend on their interpreter
        )
        if install in probed.values.get("copy", ()):
            return install, False
        parameters = {"install": install, "interpreter": python, "wanted": __version__}
        pushed = await self._ask(make_request("push", parameters, rest=wheels.archive))
        return install, pushed.first("did") == "copied"

    def _left(self) -> float:
        return max(0.001, self._deadline - time.monotonic())

    async def _ask(self, request: ScriptRequest) -> ScriptAnswer:
        ended = await send_request(self._ssh, self._node, request, seconds=round(self._left(), 1) or 0.1)
        answer = parse_answer(ended.output, request.mark)
        if (error := answer.first("error")) is not None:
            raise NodeError(
                error[:_MAX_REASON_CHARACTERS],
                hint=_CREDENTIAL_HINT if "refused" in error and " token" in error else answer.first("hint"),
            )
        if not answer.is_complete:
            lines = [line.strip() for line in ended.errors.splitlines() if line.strip()]
            reason = f": {lines[-1][:_MAX_REASON_CHARACTERS]}" if lines else f" (exit code {ended.code})"
            raise NodeError(
                f"the deploy script did not finish on the node{reason}",
                hint=f"check that `ssh {self._node.destination} sh -c date` prints the time",
            )
        return answer

    def _outcome(self, answer: ScriptAnswer, *, pushed: bool = False) -> NodeOutcome:
        return NodeOutcome(
            self._node,
            0.0,
            did=answer.first("did"),
            state=answer.first("state"),
            hostname=answer.first("node"),
            pid=answer.number("pid"),
            since=answer.number("since"),
            how=answer.first("how"),
            version=answer.first("version"),
            head=answer.first("head"),
            link=answer.first("link"),
            notes=tuple(answer.values.get("note", ())),
            pushed=pushed,
        )


async def run_on_all(
    nodes: Sequence[NodeSpec],
    job: NodeTask,
    *,
    parallel: int,
    begun: Callable[[NodeSpec], None],
    done: Callable[[NodeOutcome], None],
) -> None:
    """Run a task on all nodes, some in parallel.

    Args:
        nodes: The nodes.
        job: The task.
        parallel: Maximum number of nodes at a time.
        begun: Called when the task starts on a node.
        done: Called with each outcome as soon as it is there.
    """
    waiting = iter(nodes)

    async def worker() -> None:
        for node in waiting:
            begun(node)
            done(await job(node))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(parallel, len(nodes))):
            group.create_task(worker())


async def show_log(
    ssh: SshConfig,
    node: NodeSpec,
    show: Callable[[NodeSpec, str], None],
    *,
    lines: int,
    follow: bool,
    seconds: float,
    slug: str | None = None,
) -> NodeOutcome:
    """Show the log of one node's agent.

    Args:
        ssh: The ssh configuration.
        node: The node.
        show: Called with each line.
        lines: Number of existing lines to show.
        follow: Continue with new lines until cancelled.
        seconds: Time limit, unless following.
        slug: Slug of the head whose agents to show; None for all.
    """
    began = time.monotonic()
    request = make_request("logs", {"lines": str(lines), "follow": "yes" if follow else None, "slug": slug})
    reader = _LogOutputParser(request.mark, lambda line: show(node, line), None if follow else _MAX_LOG_BYTES)
    error: GpulseError | None = None
    try:
        await send_request(ssh, node, request, seconds=None if follow else seconds, receive=reader.add)
        reader.flush()
        answer = parse_answer(reader.answer, request.mark)
        if (reason := answer.first("error")) is not None:
            raise NodeError(reason, hint=answer.first("hint"))
        if not answer.is_complete:
            raise NodeError("the connection was interrupted", hint="try again")
    except GpulseError as failed:
        error = failed
    return NodeOutcome(
        node,
        round(time.monotonic() - began, 3),
        did=None if error else "shown",
        error=error.message if error else None,
        hint=error.hint if error else None,
    )


class _LogOutputParser:
    """Splits ssh output into lines, and separates the script's answer from the log."""

    def __init__(self, mark: str, show: Callable[[str], None], limit_bytes: int | None) -> None:
        self._mark = mark.encode()
        self._show = show
        self._rest = b""
        self._is_log = False
        self._left = limit_bytes
        self.answer = b""

    def add(self, piece: bytes) -> None:
        if self._left is not None:
            self._left -= len(piece)
            if self._left < 0:
                raise NodeError(
                    "the log is larger than 16 MiB; the rest is not shown", hint="show fewer lines: -n 50"
                )
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            self._take(line)
        if len(self._rest) > _MAX_LINE_BYTES:
            self.flush()

    def flush(self) -> None:
        rest, self._rest = self._rest, b""
        if rest:
            self._take(rest)

    def _take(self, line: bytes) -> None:
        if line.startswith(self._mark + b" "):
            if len(self.answer) < _MAX_ANSWER_BYTES:
                self.answer += line + b"\n"
            self._is_log = self._is_log or line.startswith(self._mark + b" log ")
        elif self._is_log:
            self._show(line.decode("utf-8", "replace"))
