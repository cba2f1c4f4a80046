"""A small head for tests of agents: a real gRPC server that keeps numbers instead of frames and says what it gets.

It runs as a process (`python -m tests.integration.fake_head STORE`), so that it can be killed. What it acknowledged is
in STORE, a line a frame. Everything that happens is a JSON line on standard output; JSON lines on standard input change
how it behaves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from gpulse.cluster import wire
from gpulse.cluster.head.message_decoder import MAX_RUNS
from gpulse.cluster.wire_pb2 import AgentMessage, Batch, Durable, HeadMessage, Hello, Settings, Welcome
from gpulse.model.packed_columns import layout_id, split_packed_frames


def say(**event: Any) -> None:
    """Tell the test."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


class FakeHead:
    """Checks what agents send and acknowledges it."""

    def __init__(self, store: Path, options: argparse.Namespace) -> None:
        self._options = options
        self._received: dict[bytes, int] = {}
        if store.exists():
            for line in store.read_text().splitlines():
                run, sequence = line.split()[:2]
                self._received[bytes.fromhex(run)] = int(sequence)
        self._file = store.open("a")
        self._settings = Settings(interval_ms=options.interval_ms)
        self._context: Any = None
        self._writing = asyncio.Lock()
        """A stream takes one message at a time."""
        self._acknowledges = not options.silent

    async def stream(self, messages: AsyncIterator[AgentMessage], context: Any) -> None:
        """One agent."""
        if self._options.refuse:
            await context.abort(grpc.StatusCode[self._options.refuse], self._options.reason)
        first = await anext(aiter(messages))
        if len(first.hello.runs) > MAX_RUNS:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "it does not say which run it is")
        say(
            kind="hello", **_words(first.hello), token=dict(context.invocation_metadata()).get(wire.TOKEN_KEY)
        )
        self._context = context
        await self._write(self._welcome(first.hello))
        layouts: set[int] = set()
        async for message in messages:
            match message.WhichOneof("kind"):
                case "layout":
                    layouts.add(layout_id(message.layout.text))
                case "batch":
                    self._take(message.batch, layouts)
                    if self._acknowledges:
                        await self._write(self._durable(message.batch.run))
                case "dropped":
                    say(kind="dropped", run=message.dropped.id.hex(), frames=message.dropped.dropped)
                case kind:
                    say(kind=kind)
                    if kind == "goodbye":
                        return

    async def _write(self, message: HeadMessage) -> None:
        async with self._writing:
            await self._context.write(message)

    def _welcome(self, hello: Hello) -> HeadMessage:
        durable = [Durable(run=run.id, sequence=self._received.get(run.id, 0)) for run in hello.runs]
        return HeadMessage(
            welcome=Welcome(
                protocol=wire.PROTOCOL,
                version="0",
                head=self._options.head_id,
                node=hello.host,
                settings=self._settings,
                durable=durable,
            )
        )

    def _durable(self, run: bytes) -> HeadMessage:
        return HeadMessage(durable=Durable(run=run, sequence=self._received[run]))

    def _take(self, batch: Batch, layouts: set[int]) -> None:
        data = zlib.decompress(batch.frames) if batch.zipped else batch.frames
        frames = list(split_packed_frames(data))
        if len(frames) != batch.count:
            say(kind="wrong", why="count")
        unknown = sum(block.layout not in layouts for frame in frames for block in frame.blocks)
        if unknown:
            say(kind="wrong", why=f"{unknown} blocks of unknown layouts")
        before = self._received.get(batch.run, 0)
        if batch.first > before + 1:
            say(kind="gap", run=batch.run.hex(), frames=batch.first - before - 1)
        for sequence, frame in enumerate(frames, batch.first):
            if sequence > before:
                self._file.write(f"{batch.run.hex()} {sequence} {frame.time_us} {frame.monotonic_us}\n")
                self._received[batch.run] = sequence
        self._file.flush()
        events = [event for frame in frames if frame.events for event in json.loads(frame.events)]
        say(
            kind="batch",
            run=batch.run.hex(),
            first=batch.first,
            count=batch.count,
            zipped=batch.zipped,
            events=events,
        )

    async def obey(self, order: dict[str, Any]) -> None:
        """Change how it behaves."""
        if "interval_ms" in order:
            self._settings = Settings(interval_ms=order["interval_ms"])
            await self._write(HeadMessage(settings=self._settings))
        if "acknowledge" in order:
            self._acknowledges = order["acknowledge"]
            for run in self._received if self._acknowledges else ():
                await self._write(self._durable(run))


def _words(hello: Hello) -> dict[str, Any]:
    return {
        "host": hello.host,
        "machine": hello.machine,
        "instance": hello.instance,
        "pid": hello.pid,
        "labels": dict(hello.labels),
        "node": json.loads(hello.node),
        "runs": [
            {
                "id": run.id.hex(),
                "first_kept": run.first_kept,
                "dropped": run.dropped,
                "ended_badly": run.ended_badly,
                "lost_at_most": run.lost_at_most,
            }
            for run in hello.runs
        ],
    }


async def _serve(options: argparse.Namespace) -> None:
    head = FakeHead(Path(options.store), options)
    server = grpc.aio.server(options=wire.server_options())
    handler = grpc.stream_stream_rpc_method_handler(
        head.stream,
        request_deserializer=AgentMessage.FromString,
        response_serializer=HeadMessage.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(wire.SERVICE, {"Stream": handler}),)
    )
    port = server.add_insecure_port(f"{options.host}:{options.port}")
    await server.start()
    say(kind="listening", port=port)
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        await head.obey(json.loads(line))
    await server.stop(None)


def main() -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("store")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--interval-ms", type=int, default=100)
    parser.add_argument("--head-id", default="store-1")
    parser.add_argument("--refuse")
    parser.add_argument("--reason", default="no")
    parser.add_argument("--silent", action="store_true")
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
