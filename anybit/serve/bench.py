"""A client that puts load on any OpenAI server, and measures what its users would see."""

import asyncio
import json
import math
import random
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from anybit.errors import InvalidInput, Unsupported
from anybit.files.directory import check_folder, write_json
from anybit.files.picture import check_picture
from anybit.files.server import first_model, key_header, reached

if TYPE_CHECKING:
    import httpx

Connect = Callable[[], "httpx.AsyncClient"]
Plan = list[tuple[float, int, int]]  # of requests: arrival, tokens of the prompt and the answer
REFUSALS = (400, 404, 405, 422, 501)  # of a form that a server does not know
WORDS = (
    "time",
    "way",
    "year",
    "work",
    "man",
    "day",
    "part",
    "life",
    "world",
    "place",
    "water",
    "light",
    "house",
    "point",
    "hand",
    "word",
    "side",
    "line",
    "city",
    "group",
    "story",
    "night",
    "field",
    "state",
    "music",
    "paper",
    "river",
    "table",
    "voice",
    "plant",
)
SMALLEST_TOKEN = 100  # random prompts leave out the first tokens of a vocabulary: special ones
HEAD = (  # times in ms
    f"{'':38}{'first token, ms':>20}{'per token, ms':>18}{'between':>10}\n"
    f"{'load':>10}{'requests':>10}{'failed':>8}{'tokens/s':>10}{'median':>11}{'99 %':>9}"
    f"{'median':>9}{'99 %':>9}{'99 %':>10}"
)


@dataclass(frozen=True)
class Lengths:
    """Numbers of tokens: one, or lognormal ones.

    Attributes:
        median: of them.
        spread: standard deviation of their logarithm.
        least: that are drawn.
        most: that are drawn.
    """

    median: int
    spread: float = 0.0
    least: int = 1
    most: int = 1 << 20

    @classmethod
    def read(cls, text: str) -> "Lengths":
        """Of `128`, `270~1.0` (median and spread), or `270~1.0:16-3000` (within bounds).

        Raises:
            InvalidInput: The text is none of these.
        """
        found = re.fullmatch(r"(\d+)(?:~(\d*\.?\d+)(?::(\d+)-(\d+))?)?", text.strip())
        if (
            found is None
            or not int(found[1])
            or (found[3] and not 0 < int(found[3]) <= int(found[4]))
        ):
            raise InvalidInput(
                f"{text!r} is no number of tokens; give 128, or 270~1.0 for a median and a spread, "
                "or 270~1.0:16-3000 for these within bounds"
            )
        bounds = (int(found[3]), int(found[4])) if found[3] else ()
        return cls(int(found[1]), float(found[2] or 0), *bounds)

    def draw(self, rng: random.Random) -> int:
        drawn = self.median * rng.lognormvariate(0, self.spread) if self.spread else self.median
        return min(self.most, max(self.least, int(drawn)))


def numbers(text: str, option: str, what: str, kind: type[float] = float) -> list[Any]:
    """Numbers above 0 of `4,16`.

    Raises:
        InvalidInput: The text is something else; it names the option, and what to give.
    """
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < each < math.inf for each in found):
        raise InvalidInput(f"{option} {text}: give {what}, such as 4 or 4,16,32")
    return found


@dataclass(frozen=True)
class Load:
    """What is asked of a server.

    Attributes:
        prompt: tokens of prompts.
        output: tokens of answers.
        rate: requests a second, at random times (Poisson); None: `streams` at a time.
        seconds: of arrivals at that rate.
        streams: requests at the same time, if there is no rate.
        requests: in all, if there is no rate.
    """

    prompt: Lengths
    output: Lengths
    rate: float | None = None
    seconds: float = 30.0
    streams: int = 16
    requests: int = 64

    def plan(self, rng: random.Random) -> Plan:
        """Each request's arrival in seconds, tokens of its prompt, and of its answer."""
        if self.rate is None:
            return [(0, self.prompt.draw(rng), self.output.draw(rng)) for _ in range(self.requests)]
        at = rng.expovariate(self.rate)
        out: Plan = []
        while at < self.seconds or not out:
            out.append((at, self.prompt.draw(rng), self.output.draw(rng)))
            at += rng.expovariate(self.rate)
        return out


@dataclass
class Seen:
    """One answer: when it was asked for, when its tokens came, how many.

    error: what went wrong. status: HTTP's.
    """

    asked: float
    times: list[float] = field(default_factory=list)
    tokens: int = 0
    error: str = ""
    status: int = 0


def summary(seen: Sequence[Seen], seconds: float) -> dict[str, float]:
    """What users saw: numbers of requests, tokens a second, and times in ms.

    `ttft` is the time to the first token, `tpot` the rest's time for each token, `itl` the time
    between two that arrive one after the other.
    """
    good = [s for s in seen if s.times and not s.error]
    waits = {
        "ttft": [s.times[0] - s.asked for s in good],
        "tpot": [(s.times[-1] - s.times[0]) / (s.tokens - 1) for s in good if s.tokens > 1],
        "itl": [b - a for s in good for a, b in pairwise(s.times)],
    }
    out = {
        "requests": float(len(seen)),
        "failed": float(len(seen) - len(good)),
        "out_tok_s": sum(s.tokens for s in good) / seconds,
    }
    for name, values in waits.items():
        ranked = sorted(values)
        for part, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
            at = min(len(ranked) - 1, int(share * len(ranked)))
            out[f"{name}_{part}_ms"] = 1e3 * ranked[at] if ranked else 0.0
    return out


class Form(NamedTuple):
    """How a server is asked.

    Attributes:
        chat: by /v1/chat/completions, else by /v1/completions.
        words: prompts are text, of about as many tokens, else numbers of tokens.
        exact: answers are to have as many tokens as asked, and to tell which, which is no part of
            OpenAI's protocol.
    """

    chat: bool = False
    words: bool = False
    exact: bool = True

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, model: str, prompt: list[int], tokens: int) -> dict[str, Any]:
        """A request. prompt: numbers of tokens."""
        out: dict[str, Any] = {
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": tokens,
        }
        text = " ".join(WORDS[token % len(WORDS)] for token in prompt)
        if self.chat:
            out["messages"] = [{"role": "user", "content": text}]
        else:
            out["prompt"] = text if self.words else prompt
        if self.exact:
            out |= {"ignore_eos": True, "return_token_ids": True}
        return out | ({"model": model} if model else {})

    def __str__(self) -> str:
        ends = "" if self.exact else ", and answers end where the model ends them"
        return f"asked by {self.path}, with words for tokens{ends}"


# The first that a server takes is used.
FORMS = (
    Form(),
    Form(words=True),
    Form(words=True, exact=False),
    Form(True, True),
    Form(True, True, exact=False),
)


async def fitting(connect: Connect, model: str) -> Form:
    """The first form that a server does not refuse, by a request of one token in each."""
    async with connect() as client:
        for form in FORMS:
            seen = Seen(time.perf_counter())
            await ask(client, form, form.body(model, [SMALLEST_TOKEN] * 4, 1), seen)
            if seen.status not in REFUSALS:
                return form
    return FORMS[0]


async def ask(client: "httpx.AsyncClient", form: Form, body: dict[str, Any], seen: Seen) -> None:
    """Stream one answer."""
    async with client.stream("POST", form.path, json=body) as answer:
        seen.status = answer.status_code
        if answer.status_code != 200:
            seen.error = f"{answer.status_code}: {(await answer.aread()).decode()[:200]}"
            return
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                seen.error = str(event["error"].get("message", event["error"]))
                return
            for choice in event.get("choices", ()):
                # Servers that do not tell tokens send text for each, and their number at the end.
                part = choice.get("delta") or choice
                text = part.get("text") or part.get("content") or part.get("reasoning_content")
                count = len(choice.get("token_ids") or (text or "")[:1])
                seen.times += [time.perf_counter()] * count
            seen.tokens = (event.get("usage") or {}).get("completion_tokens", len(seen.times))
    if not seen.times:
        seen.error = "the answer has no tokens"


async def put(
    load: Load, connect: Connect, form: Form, model: str, largest: int, plan: Plan, begin: float
) -> list[Seen]:
    """Ask for random prompts of tokens from `SMALLEST_TOKEN` up to below `largest`.

    Prompts are new each time, so that no prefix cache has them.

    Args:
        load: Its rate, or its streams.
        connect: Makes a client.
        form: How requests are put.
        model: Its name there.
        largest: All tokens are below it.
        plan: The requests.
        begin: When times of the plan begin, of `time.perf_counter`.
    """
    rng = random.Random()
    bodies = [
        form.body(model, [rng.randrange(SMALLEST_TOKEN, largest) for _ in range(prompt)], tokens)
        for _, prompt, tokens in plan
    ]
    out: list[Seen] = []

    async def arrive(at: float, body: dict[str, Any]) -> None:
        await asyncio.sleep(begin + at - time.perf_counter())
        out.append(Seen(begin + at))  # a client that is late makes nobody's wait shorter
        await ask(client, form, body, out[-1])

    async def repeat() -> None:
        for body in todo:
            out.append(Seen(time.perf_counter()))
            await ask(client, form, body, out[-1])

    todo = iter(bodies)
    async with connect() as client:
        await asyncio.sleep(begin - time.perf_counter())
        if load.rate is None:
            await asyncio.gather(*(repeat() for _ in range(load.streams)))
        else:
            pairs = zip(plan, bodies, strict=True)
            await asyncio.gather(*(arrive(at, body) for (at, *_), body in pairs))
    return out


def clients() -> int:
    """Processes that ask: one would be late at many tokens a second; a server has most cores."""
    from anybit.kernels.processes import cores

    return max(1, cores() // 4)


def put_all(
    load: Load, connect: Connect, form: Form, model: str, largest: int
) -> tuple[list[Seen], float]:
    """Put a load on a server from several processes; what was seen, and seconds.

    Times and lengths are the same each time, and for any number of processes.
    """
    plan, most = load.plan(random.Random(0)), clients()
    most = min(most, len(plan), load.streams if load.rate is None else most)
    if most == 1:
        begin = time.perf_counter()
        seen = asyncio.run(put(load, connect, form, model, largest, plan, begin))
        return seen, time.perf_counter() - begin
    with ProcessPoolExecutor(most, get_context("spawn")) as pool:
        wait([pool.submit(time.sleep, 0.5) for _ in range(most)])  # all of them have begun
        begin = time.perf_counter() + 1.0  # and made their prompts
        parts = []
        for at in range(most):
            own = replace(load, streams=len(range(at, load.streams, most)))
            given = own, connect, form, model, largest, plan[at::most], begin
            parts.append(pool.submit(put_part, *given))
        seen = [one for part in parts for one in part.result()]
    return seen, max((one.times[-1] for one in seen if one.times), default=begin) - begin


def put_part(*given: Any) -> list[Seen]:
    """`put` in a process of its own."""
    return asyncio.run(put(*given))


def run(
    url: str,
    loads: Sequence[Load],
    largest_token: int,
    api_key: str | None,
    show: Callable[[str], object],
    report: Path | None = None,
    picture: Path | None = None,
) -> None:
    """Put each load on a server, print a line for it, and write the rows.

    Args:
        url: http://HOST:PORT of any server of OpenAI's protocol, with /v1 or without.
        loads: one after the other.
        largest_token: prompts hold tokens below it.
        api_key: the first is sent of several, which the server's variable may hold.
        show: takes lines.
        report: a JSON file to write.
        picture: a plot to write.

    Raises:
        ConnectionError: There is no server, or none any more.
        Unsupported: No request was answered.
    """
    import httpx

    if report:
        check_folder(report)
    if picture:
        check_picture(picture)
    headers, url = key_header(api_key), url.rstrip("/").removesuffix("/v1")

    limits = httpx.Limits(max_connections=None)
    connect = partial(httpx.AsyncClient, base_url=url, timeout=None, headers=headers, limits=limits)
    rows: list[dict[str, Any]] = []
    with reached(url):
        model = served(url, headers)
        form = asyncio.run(fitting(connect, model))
        if form != FORMS[0]:
            show(str(form))
        before = drafts(url, headers)
        for load in loads:
            seen, seconds = put_all(load, connect, form, model, largest_token)
            row = summary(seen, seconds)
            tell_failures(seen, show)
            if not rows:
                show(HEAD)
            rows.append({"rate_per_s": load.rate, "streams": load.streams} | row)
            show(line(load, row))
    drafted, accepted = (b - a for a, b in zip(before, drafts(url, headers), strict=True))
    if drafted:
        show(f"drafts: {accepted:,.0f} of {drafted:,.0f} tokens taken")
    if report:
        facts = {"url": url, "model": model, "path": form.path, "words": form.words}
        facts |= {"exact": form.exact, "date": date.today().isoformat()}
        lengths = {"prompt": asdict(loads[0].prompt), "output": asdict(loads[0].output)}
        write_json(report, facts | lengths | {"rows": rows})
    if picture:
        plot(rows, model, picture)


def tell_failures(seen: Sequence[Seen], show: Callable[[str], object]) -> None:
    """Show what went wrong, three things at most; Unsupported where nothing went well."""
    for text in sorted({s.error for s in seen if s.error})[:3]:
        show(f"failed: {text}")
    if not any(s.times and not s.error for s in seen):
        raise Unsupported("no request was answered, so there is nothing to measure")


def line(load: Load, row: dict[str, float]) -> str:
    name = f"{load.streams} open" if load.rate is None else f"{load.rate:g}/s"
    return (
        f"{name:>10}{row['requests']:>10.0f}{row['failed']:>8.0f}{row['out_tok_s']:>10.1f}"
        f"{row['ttft_p50_ms']:>11.1f}{row['ttft_p99_ms']:>9.1f}{row['tpot_p50_ms']:>9.2f}"
        f"{row['tpot_p99_ms']:>9.2f}{row['itl_p99_ms']:>10.1f}"
    )


def plot(rows: Sequence[dict[str, Any]], model: str, path: Path) -> None:
    """Times over the load: medians, and dashed the 99th percentiles."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    loads = [row["rate_per_s"] or row["streams"] for row in rows]
    names = {"ttft": "time to first token", "tpot": "time per token", "itl": "between tokens"}
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for color, (key, label) in zip(("C0", "C1", "C2"), names.items(), strict=True):
        for part, style in (("p50", "o-"), ("p99", "o--")):
            shown = label if part == "p50" else None
            values = [row[f"{key}_{part}_ms"] for row in rows]
            axes.plot(loads, values, style, color=color, label=shown)
    axes.set(
        xlabel="requests a second" if rows[0]["rate_per_s"] else "requests at the same time",
        ylabel="ms (dashed: 99 % of them)",
        yscale="log",
        title=model,
    )
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)


def served(url: str, headers: dict[str, str]) -> str:
    """The first model that a server names; "" where it names none."""
    import httpx

    try:
        models = httpx.get(f"{url}/v1/models", headers=headers).json()
    except ValueError:
        return ""
    return str(first_model(models).get("id", ""))


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
