"""What a relay learns of a controller that ends its connection while a message is sent, with a real server of gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from ttp.launch.links.relay import LOST_STATUS, ending_of
from ttp.proto.transport import grpc

CODE = grpc.StatusCode
REFUSED = (CODE.PERMISSION_DENIED, "no agent", False)
GONE = (CODE.UNAVAILABLE, "the connection to the controller ended while a message was sent", True)
ENDS = 100


@contextlib.asynccontextmanager
async def refusing(go: threading.Event) -> AsyncIterator[str]:
    """Serve streams that are refused when `go` is set, each once."""

    async def refuse(messages: Any, context: Any) -> None:
        await context.write(b"open")
        await asyncio.get_running_loop().run_in_executor(None, go.wait)
        go.clear()
        await context.abort(CODE.PERMISSION_DENIED, "no agent")

    server = grpc.aio.server()
    handler = grpc.stream_stream_rpc_method_handler(refuse)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Carry": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def endings(address: str, go: threading.Event) -> list[Any]:
    found = []
    async with grpc.aio.insecure_channel(address) as channel:
        carry: Any = channel.stream_stream("/test/Carry")  # type: ignore[call-arg]
        for _ in range(ENDS):
            call: Any = carry()
            opened = asyncio.Event()

            async def read(call: Any = call, opened: asyncio.Event = opened) -> Any:
                try:
                    async for _ in call:
                        opened.set()
                except grpc.aio.AioRpcError as error:
                    return ending_of(error)

            reader = asyncio.create_task(read())
            await opened.wait()
            go.set()
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                while not reader.done():
                    await call.write(b"a message")
            found.append(await reader)
    return found


def test_streams_end_with_the_controllers_word_or_as_a_lost_connection() -> None:
    """Never that their relay has failed, for which they would leave it. gRPC loses the word of some of these."""
    served, over, go = threading.Event(), threading.Event(), threading.Event()
    address = ""

    def serve() -> None:
        async def until_over() -> None:
            nonlocal address
            async with refusing(go) as address:
                served.set()
                await asyncio.get_running_loop().run_in_executor(None, over.wait)

        asyncio.run(until_over())

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert served.wait(30)
    found = asyncio.run(asyncio.wait_for(endings(address, go), 200))
    over.set()
    thread.join(30)
    assert REFUSED in found and set(found) <= {REFUSED, GONE}


@pytest.mark.parametrize(
    ("code", "text", "ending"),
    [
        (CODE.INTERNAL, LOST_STATUS, GONE),
        (CODE.INTERNAL, "another", (CODE.INTERNAL, "another", False)),
        (CODE.UNAVAILABLE, "Socket closed", (CODE.UNAVAILABLE, "Socket closed", True)),
        (CODE.PERMISSION_DENIED, "no agent", REFUSED),
    ],
)
def test_of_a_status_that_was_lost_only_the_end_of_the_connection_is_known(
    code: grpc.StatusCode, text: str, ending: Any
) -> None:
    nothing = grpc.aio.Metadata()
    assert ending_of(grpc.aio.AioRpcError(code, nothing, nothing, text, None)) == ending
