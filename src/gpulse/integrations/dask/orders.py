"""How the scheduler has workers do something, each on its own: one that is dead or deaf costs the others nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from gpulse.integrations.dask.roster import Member
from gpulse.integrations.dask.wire import ORDER, PLUGIN, Order

if TYPE_CHECKING:
    from distributed import Scheduler

PATIENCE_SECONDS = 10.0
"""A worker that has not obeyed by then is left alone."""

_log = logging.getLogger("distributed.scheduler.gpulse")


class Orders:
    """Speaks to the workers of one cluster."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    async def give(self, orders: Mapping[Member, Order]) -> list[str]:
        """Have workers do what each is told; the troubles that they had, which they are remembered for."""
        return _told(await asyncio.gather(*(self._give(member, order) for member, order in orders.items())))

    async def put_plugin(self, members: Iterable[Member], plugin: bytes) -> list[str]:
        """Put a plugin into workers."""
        calls = (self._call(member, "plugin-add", plugin=plugin, name=PLUGIN) for member in members)
        return _told(await asyncio.gather(*calls))

    async def take_plugin(self, members: Iterable[Member]) -> None:
        """Take it out again."""
        await asyncio.gather(*(self._call(member, "plugin-remove", name=PLUGIN) for member in members))

    async def _give(self, member: Member, order: Order) -> str | None:
        return await self._call(member, ORDER, **order._asdict())

    async def _call(self, member: Member, question: str, /, **arguments: Any) -> str | None:
        """What went wrong, None when nothing did."""
        trouble = await self._answer(member, question, arguments)
        if trouble is None:
            return None
        member.complain([trouble])
        return f"worker {member.index} ({member.address}): {trouble}"

    async def _answer(self, member: Member, question: str, arguments: Mapping[str, Any]) -> str | None:
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                answer = await getattr(self._scheduler.rpc(member.address), question)(**arguments)
        except TimeoutError:
            return f"it did not answer within {PATIENCE_SECONDS:g} s"
        except OSError as error:
            return f"it could not be reached: {error}" if member.here else None
        except Exception as error:  # noqa: BLE001  a fault in one worker stays with that worker
            _log.warning("worker %s: %r", member.address, error)
            return f"it failed: {error!r}"
        return _fault(answer)


def _fault(answer: Any) -> str | None:
    """What an answer complains about; dask answers questions that it does not know with nothing."""
    if not isinstance(answer, Mapping):
        return "it is not monitored: something took the plugin out of it, or gpulse is not installed there"
    if answer.get("status") == "error":
        return f"it failed: {answer.get('exception_text') or answer.get('text') or answer.get('exception')}"
    if answer.get("lost"):
        return f"its last {answer['lost']} measurements are lost: the scheduler did not take them in time"
    return None


def _told(troubles: Iterable[str | None]) -> list[str]:
    return [trouble for trouble in troubles if trouble is not None]
