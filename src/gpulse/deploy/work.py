"""Carries an order out on many nodes at once; what goes wrong on one of them is that one's outcome."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence

from gpulse._version import __version__
from gpulse.cluster.client.address import agent_addresses
from gpulse.deploy.helpers import Helpers
from gpulse.deploy.nodes import NodeSpec
from gpulse.deploy.order import Order, Outcome, head_of, outcome_of, slug_of, words_for
from gpulse.deploy.script import Answer, Letter, letter, read_answer
from gpulse.deploy.ssh import NodeError, Ssh, converse
from gpulse.deploy.wheelhouse import Kind, Wheelhouse, kind_of, pack_for
from gpulse.errors import GpulseError

Job = Callable[[NodeSpec], Awaitable[Outcome]]

_MOST_TOLD = 300
_UNKNOWN_THERE = "--token-file FILE with the head's token; nodes get it from here"


class Shop:
    """Makes each wheelhouse once, when the first node needs it."""

    def __init__(self, prepared: Wheelhouse | None = None) -> None:
        """Prepare to make them.

        Args:
            prepared: One that was made before, for all nodes.
        """
        self._prepared = prepared
        self._made: dict[Kind, asyncio.Task[Wheelhouse]] = {}
        self._helpers = Helpers()

    async def wheels_for(self, kind: Kind) -> Wheelhouse:
        """The wheels for a kind of machine.

        Raises:
            GpulseError: They cannot be had.
        """
        if self._prepared is not None:
            return self._prepared
        if kind not in self._made:
            self._made[kind] = asyncio.create_task(asyncio.to_thread(pack_for, kind, self._helpers))
        return await asyncio.shield(self._made[kind])

    async def close(self) -> None:
        """End what is being made."""
        self._helpers.end()
        await asyncio.gather(*self._made.values(), return_exceptions=True)


class Foreman:
    """Does what an order says on one node after the other, or on all at once."""

    def __init__(self, ssh: Ssh, order: Order, shop: Shop, *, seconds: float) -> None:
        """Prepare to work.

        Args:
            ssh: How nodes are reached.
            order: What is to be done.
            shop: Makes wheelhouses.
            seconds: How long one node may take.
        """
        self._ssh = ssh
        self._order = order
        self._shop = shop
        self._seconds = seconds

    async def job(self, node: NodeSpec) -> Outcome:
        """Do it on one node; whatever happens, it is the outcome."""
        began = time.monotonic()
        try:
            made = await _Visit(self._ssh, node, self._order, self._shop, began + self._seconds).work()
        except GpulseError as error:
            made = Outcome(node, 0.0, error=error.message, hint=error.hint)
        except Exception as error:  # noqa: BLE001  what goes wrong with one node stops no other
            made = Outcome(node, 0.0, error=f"a fault in gpulse: {error!r}"[:_MOST_TOLD])
        return made._replace(seconds=round(time.monotonic() - began, 3))


class _Visit:
    """The connections to one node that an order takes, all of them before one deadline."""

    def __init__(self, ssh: Ssh, node: NodeSpec, order: Order, shop: Shop, deadline: float) -> None:
        self._ssh, self._node, self._order, self._shop, self._deadline = ssh, node, order, shop, deadline

    async def work(self) -> Outcome:
        match self._order.verb:
            case "up" | "restart":
                return await self._up()
            case "purge":
                spool = "yes" if self._order.spool else None
                told = await self._ask(letter("purge", {"spool": spool, "slug": self._slug()}))
            case verb:
                told = await self._ask(letter(verb, {"slug": self._slug()}))
        return outcome_of(self._node, told, 0.0)

    def _slug(self) -> str | None:
        """Which agents are meant, None for all."""
        return None if self._order.head is None else slug_of(head_of(self._node, self._order))

    async def _up(self) -> Outcome:
        node, order = self._node, self._order
        parameters = {"gpulse": node.gpulse, "venv": node.venv, "python": node.python or order.python}
        parameters |= {
            "force": "yes" if order.verb == "restart" else None,
            "keep": "yes" if order.keep else None,
            "bare": "yes" if order.bare else None,
        }
        if not order.keep or order.head or node.head:
            head = head_of(node, order)
            targets = ",".join(address.target for address in agent_addresses(head))
            parameters |= {"head": head, "slug": slug_of(head), "target": targets}
        pushed = False
        if order.push and node.gpulse is None and node.venv is None:
            parameters["install"], pushed = await self._push(parameters["python"])
        told = await self._ask(letter("up", parameters, words_for(node, order), order.pieces))
        return outcome_of(node, told, 0.0, pushed=pushed)

    async def _push(self, python: str | None) -> tuple[str, bool]:
        """Make sure that a copy of gpulse is there; which one, and whether it was sent."""
        told = await self._ask(letter("probe", {"python": python}))
        kind = kind_of(told.first("facts") or "")
        try:
            async with asyncio.timeout(self._left()):
                wheels = await self._shop.wheels_for(kind)
        except TimeoutError as error:
            raise NodeError("the wheels for it were not ready in time", hint="--timeout 1800") from error
        python = told.first("python")
        interpreter = hashlib.sha256((told.first("real") or python or "").encode()).hexdigest()[:8]
        install = f"{wheels.key}-{kind.text}-{interpreter}"  # environments point to their interpreter
        if install in told.said.get("copy", ()):
            return install, False
        parameters = {"install": install, "interpreter": python, "wanted": __version__}
        done = await self._ask(letter("push", parameters, rest=wheels.archive))
        return install, done.first("did") == "copied"

    def _left(self) -> float:
        return max(0.001, self._deadline - time.monotonic())

    async def _ask(self, order: Letter) -> Answer:
        ended = await converse(self._ssh, self._node, order, seconds=round(self._left(), 1) or 0.1)
        answer = read_answer(ended.output, order.mark)
        if (error := answer.first("error")) is not None:
            raise NodeError(
                error[:_MOST_TOLD],
                hint=_UNKNOWN_THERE if "refuses" in error and " token" in error else answer.first("hint"),
            )
        if not answer.is_complete:
            said = [line.strip() for line in ended.errors.splitlines() if line.strip()]
            reason = f": {said[-1][:_MOST_TOLD]}" if said else f" (exit code {ended.code})"
            raise NodeError(
                f"it did not do what was asked{reason}",
                hint=f"see whether `ssh {self._node.destination} sh -c date` prints the time",
            )
        return answer


async def everywhere(
    nodes: Sequence[NodeSpec],
    job: Job,
    *,
    parallel: int,
    begun: Callable[[NodeSpec], None],
    done: Callable[[Outcome], None],
) -> None:
    """Do something on all nodes, some at a time.

    Args:
        nodes: Where.
        job: What.
        parallel: On how many at once.
        begun: Told when work on a node begins.
        done: Told each outcome at once.
    """
    waiting = iter(nodes)

    async def worker() -> None:
        for node in waiting:
            begun(node)
            done(await job(node))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(parallel, len(nodes))):
            group.create_task(worker())
