"""A client that puts load on a server and measures what its users would see."""

import asyncio
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import mean, quantiles

from anybit.errors import InvalidInput, Unsupported

SMALLEST_TOKEN = 100  # random prompts leave out the first tokens of a vocabulary: special ones


@dataclass
class Seen:
    """One answer: when it was asked for, and when its tokens came. error: what went wrong."""

    asked: float
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    error: str = ""


async def load(
    url: str,
    streams: int,
    requests: int,
    prompt: int,
    output: int,
    largest_token: int,
    headers: dict[str, str],
) -> list[Seen]:
    """Send random prompts of `prompt` tokens, `streams` at a time; stream `output` tokens each."""
    import httpx

    rng = random.Random(0)
    bodies = [
        {
            "prompt": [rng.randrange(SMALLEST_TOKEN, largest_token) for _ in range(prompt)],
            "max_tokens": output,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
        }
        for _ in range(requests)
    ]
    todo, out = iter(bodies), []

    async def work(client: httpx.AsyncClient) -> None:
        for body in todo:
            seen = Seen(time.perf_counter())
            out.append(seen)
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    seen.error = f"{answer.status_code}: {(await answer.aread()).decode()[:200]}"
                    continue
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        seen.error = event["error"]["message"]
                        break
                    tokens = event["choices"][0]["token_ids"]
                    seen.tokens += tokens
                    seen.times += [time.perf_counter()] * len(tokens)

    limits = httpx.Limits(max_connections=streams)
    async with httpx.AsyncClient(
        base_url=url, timeout=None, headers=headers, limits=limits
    ) as client:
        await asyncio.gather(*(work(client) for _ in range(streams)))
    return out


def run(
    url: str,
    streams: int,
    requests: int,
    prompt: int,
    output: int,
    largest_token: int,
    api_key: str | None,
    show: Callable[[str], object],
) -> None:
    """Measure and print: throughput, means and percentiles of latencies, and how drafts went.

    api_key: the first is sent of several, which the server's variable may hold.

    Raises ConnectionError when there is no server, or none any more.
    """
    import httpx

    api_key = next(iter((api_key or "").split()), None)
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise InvalidInput("the API key holds characters that no header can")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        before = drafts(url, headers)
        start = time.perf_counter()
        seen = asyncio.run(load(url, streams, requests, prompt, output, largest_token, headers))
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise ConnectionError(
            f"no server answers at {url} ({error or type(error).__name__}); start one with "
            "`anybit serve DIR`, and give its address as http://HOST:PORT"
        ) from None
    seconds = time.perf_counter() - start
    good = [s for s in seen if s.tokens and not s.error]
    tokens = sum(len(s.tokens) for s in good)
    show(f"{len(good)} of {len(seen)} requests in {seconds:.1f} s, {streams} at a time")
    for text in sorted({s.error for s in seen if s.error}):
        show(f"failed: {text}")
    if not tokens:
        raise Unsupported("no request was answered, so there is nothing to measure")
    show(f"{tokens / seconds:.1f} tokens/s written, {len(good) * prompt / seconds:.1f} read")
    between = [b - a for s in good for a, b in zip(s.times, s.times[1:], strict=False)]
    for name, values in (
        ("first token", [s.times[0] - s.asked for s in good]),
        ("between tokens", between),
        ("whole answer", [s.times[-1] - s.asked for s in good]),
    ):
        if len(values) > 1:
            cuts = quantiles(values, n=100)
            show(
                f"{name:15} mean {mean(values) * 1e3:8.2f} ms   p50 {cuts[49] * 1e3:8.2f}   "
                f"p99 {cuts[98] * 1e3:8.2f}"
            )
    drafted, accepted = (b - a for a, b in zip(before, drafts(url, headers), strict=True))
    if drafted:
        show(f"drafts          {accepted:,.0f} of {drafted:,.0f} tokens taken")


def drafts(url: str, headers: dict[str, str]) -> tuple[float, float]:
    """Tokens that a server has drafted, and those taken; zeros where it does not say."""
    import httpx

    try:
        lines = httpx.get(f"{url}/metrics", headers=headers).text.splitlines()
    except httpx.TransportError:
        return 0.0, 0.0
    found = {line.partition("{")[0]: line.rpartition(" ")[2] for line in lines}
    drafted, accepted = (
        float(found.get(f"vllm:spec_decode_num_{what}_tokens_total", 0))
        for what in ("draft", "accepted")
    )
    return drafted, accepted
