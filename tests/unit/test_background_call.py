from __future__ import annotations

import asyncio
import threading
from concurrent.futures import wait

import pytest

from gpulse.background_call import await_background_call, start_background_call


def test_a_call_has_a_result_or_an_error() -> None:
    """Both arrive where they are waited for."""

    assert 3 == start_background_call(lambda: 1 + 2, name="sum").result(60)
    with pytest.raises(ZeroDivisionError):
        start_background_call(lambda: 1 // 0, name="error").result(60)


def test_a_call_that_hangs_is_left_alone() -> None:
    """Its caller goes on; the result is there once it comes, although the caller tried to cancel it."""

    hung = threading.Event()
    call = start_background_call(lambda: hung.wait(60), name="hangs")
    with pytest.raises(TimeoutError):
        call.result(0)
    assert not call.cancel()
    hung.set()

    assert call.result(60)


def test_the_end_of_a_loop_does_not_wait_for_a_call() -> None:
    """A call that comes back after its event loop was closed disturbs nobody."""

    hung = threading.Event()
    calls = []

    async def give_up() -> None:
        async with asyncio.timeout(0):
            calls.append(start_background_call(lambda: hung.wait(60), name="hangs"))
            await await_background_call(lambda: hung.wait(60), name="hangs too")

    with pytest.raises(TimeoutError):
        asyncio.run(give_up())
    assert not calls[0].done()
    hung.set()

    assert not wait(calls, 60).not_done


async def test_a_loop_goes_on_during_a_call() -> None:
    """The call waits for something that only the loop does."""

    reached = threading.Event()
    asyncio.get_running_loop().call_soon(reached.set)

    assert await await_background_call(lambda: reached.wait(60), name="waits")
    with pytest.raises(ZeroDivisionError):
        await await_background_call(lambda: 1 // 0, name="error")
