"""Minutes of mixed load on a real server: no token lost or doubled, nobody blocked, no block held.

    python tests/serve/soak.py --seconds 600

Clients stream, wait, leave in the middle, and ask the same again: equal requests must get equal
tokens, whatever runs beside them. Others send bodies that never end and prompts that cannot fit;
meanwhile /health must answer within a second. One of two front ends is killed every minute, which
may cut only what it serves. Run by `make soak`, not by the tests.
"""

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

MODEL = Path(__file__).parents[2] / "models" / "pico"
SERVE = "import sys; from anybit.cli import main; main()"


@contextlib.asynccontextmanager
async def cut(counts: collections.Counter):
    """Count what a killed front end has cut."""
    try:
        yield
    except httpx.TransportError:
        counts["cut"] += 1
        await asyncio.sleep(0.1)


async def killer(server: int, end: float, counts: collections.Counter):
    """Kill a front end every minute."""
    while time.monotonic() + 20 < end:
        await asyncio.sleep(min(60, end - time.monotonic() - 15))
        children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
        fronts = [n for n in children if b"front_end" in Path(f"/proc/{n}/cmdline").read_bytes()]
        counts["front ends"] = len(fronts)
        os.kill(int(random.choice(fronts)), signal.SIGKILL)
        counts["killed"] += 1


async def client(number: int, url: str, end: float, counts: collections.Counter, known: dict):
    rng = random.Random(number)
    async with httpx.AsyncClient(base_url=url, timeout=120, verify=False) as http:
        while time.monotonic() < end:
            key = rng.randrange(200)
            body = {
                "prompt": [100 + key] * (1 + key % 60), "max_tokens": 1 + key % 90, "seed": key,
                "ignore_eos": True, "return_token_ids": True, "temperature": key % 3 * 0.5,
                "stream": rng.random() < 0.7, "stream_options": {"include_usage": True},
            }  # fmt: skip
            leave = rng.randrange(1, 40) if rng.random() < 0.3 else None
            tokens, usage = [], None
            async with cut(counts), http.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code == 503:
                    counts["refused"] += 1
                    await asyncio.sleep(0.1)
                    continue
                assert answer.status_code == 200, await answer.aread()
                if not body["stream"]:
                    whole = json.loads(await answer.aread())
                    tokens, usage = whole["choices"][0]["token_ids"], whole["usage"]
                else:
                    async for line in answer.aiter_lines():
                        if not line.startswith("data: {"):
                            continue
                        event = json.loads(line[6:])
                        for choice in event["choices"]:
                            tokens += choice["token_ids"]
                        usage = event.get("usage") or usage
                        if leave and len(tokens) >= leave:
                            break
                        if rng.random() < 0.002:
                            await asyncio.sleep(0.5)  # a slow reader
            if usage is None:
                counts["left"] += 1
                continue
            counts["tokens"] += len(tokens)
            counts["requests"] += 1
            counts["lost or doubled"] += abs(len(tokens) - body["max_tokens"])
            counts["lost or doubled"] += abs(len(tokens) - usage["completion_tokens"])
            # The seed decides, up to ties: another batch rounds logits differently in the last bit.
            counts["other text"] += known.setdefault(key, tokens) != tokens


async def nuisance(url: str, port: int, end: float, counts: collections.Counter):
    """Bodies that never end, prompts that cannot fit, and bodies that are too large."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    long = "a b " * 900_000
    kinds = [
        (path, json.dumps(body).encode(), want)
        for path, body, want in (
            ("/v1/completions", {"prompt": long}, (400, 503)),
            ("/v1/completions", {"prompt": [7] * 500_000}, (400, 503)),
            ("/v1/completions", {"prompt": long * 2}, (413,)),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}, (400, 503)),
        )
    ]
    json_type = {"content-type": "application/json"}
    async with httpx.AsyncClient(base_url=url, timeout=120, verify=False) as http:
        while time.monotonic() < end:
            stalled = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
            for _, writer in stalled:
                writer.write(head + b"Content-Length: 1000\r\n\r\n{")
            for path, body, want in kinds:
                try:
                    answer = await http.post(path, content=body, headers=json_type)
                    status = answer.status_code
                except httpx.TransportError:  # the answer to a body that is not read to its end
                    status = 413
                counts["nuisances"] += 1
                counts["not refused"] += status not in want
            for _, writer in stalled:
                writer.close()


def health(url: str, end: float, seconds: list[float], counts: collections.Counter):
    """In a thread, so that it measures the server and not this process's loop."""
    with httpx.Client(base_url=url, timeout=120, verify=False) as http:
        while time.monotonic() < end:
            start = time.monotonic()
            try:
                counts["unhealthy"] += http.get("/health").status_code != 200
            except httpx.TransportError:
                counts["cut"] += 1
            seconds.append(time.monotonic() - start)
            time.sleep(0.1)


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=64)
    args = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", SERVE, "serve", str(MODEL), "--port", str(port), "--dtype",
               "float32", "--max-running", "16", "--queue", "40", "--front-ends", "2",
               "--kv-gb", "0.01", "--log-level", "warning"]  # fmt: skip
    server, url = subprocess.Popen(command), f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                if httpx.get(url + "/health").status_code == 200:
                    break
            except httpx.TransportError:
                await asyncio.sleep(0.2)
        counts: collections.Counter = collections.Counter()
        known: dict[int, list[int]] = {}
        end = time.monotonic() + args.seconds
        seconds: list[float] = []
        watch = asyncio.to_thread(health, url, end, seconds, counts)
        clients = (client(i, url, end, counts, known) for i in range(args.clients))
        await asyncio.gather(
            *clients, nuisance(url, port, end, counts), watch, killer(server.pid, end, counts)
        )
        await asyncio.sleep(1)
        metrics = {
            line.split("{")[0]: float(line.split()[-1])
            for line in httpx.get(url + "/metrics").text.splitlines()
            if line.startswith("vllm:")
        }
    finally:
        server.terminate()
        server.wait(60)
    held = [metrics[f"vllm:{name}"] for name in ("num_requests_running", "kv_cache_usage_perc")]
    print(dict(counts), "preemptions", metrics["vllm:num_preemptions_total"], "held", held)
    slow = sum(s > 1 for s in seconds)
    print(f"health: {len(seconds)} checks, slowest {max(seconds):.2f} s, {slow} above 1 s")
    wrong = counts["front ends"] != 2
    wrong += counts["lost or doubled"] + counts["not refused"] + counts["unhealthy"] + slow
    return 0 if counts["requests"] and not wrong and not any(held) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
