"""A TCP proxy as a process: stands for a network, a switch or a load balancer between nodes and a server.

    python proxy.py LISTEN_ADDR PORT TARGET_ADDR PORT

Obeys words on stdin: `hold` (nothing passes, nothing closes), `pass` (what was held is delivered), `cut` (all
connections are reset, new ones are welcome), `delay SECONDS` (each way). Says `ready`, and each word when it is done.
"""

import asyncio
import contextlib
import os
import sys

passing = asyncio.Event()
passing.set()
delay_s = 0.0
writers: set[asyncio.StreamWriter] = set()


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One direction, until it ends."""
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            if delay_s:
                await asyncio.sleep(delay_s)
            await passing.wait()
            writer.write(data)
            await writer.drain()
    await passing.wait()
    with contextlib.suppress(OSError):
        writer.close()


async def serve(listen: str, port: int, target: str, target_port: int) -> None:
    """Forward until stdin ends."""

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        try:
            their_reader, their_writer = await asyncio.open_connection(target, target_port)
        except OSError:
            writer.transport.abort()
            writers.discard(writer)
            return
        writers.add(their_writer)
        await asyncio.gather(copy(reader, their_writer), copy(their_reader, writer))
        writers.difference_update((writer, their_writer))

    await asyncio.start_server(accepted, listen, port)
    print("ready", flush=True)
    loop = asyncio.get_running_loop()
    while word := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
        obey(word)
        print(word, flush=True)
    os._exit(0)


def obey(word: str) -> None:
    """Do what the word says."""
    global delay_s
    match word.split():
        case ["hold"]:
            passing.clear()
        case ["pass"]:
            passing.set()
        case ["cut"]:
            for writer in list(writers):
                writer.transport.abort()
        case ["delay", seconds]:
            delay_s = float(seconds)
        case _:
            raise ValueError(word)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
