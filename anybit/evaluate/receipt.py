"""What is said of a comparison: figures with intervals, and hashes of all that they depend on."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anybit.errors import InvalidInput
from anybit.evaluate.generation import ANSWER, WRITTEN, repeated, same_tokens
from anybit.evaluate.perplexity import COLUMNS, Tokens
from anybit.files.directory import read_json

DRAWS = 1000  # of the bootstrap
LARGE_KL = 0.1  # nats
TAIL = 1000  # one token in so many has a KL beyond the figure `kl_999`
THIRDS = 3
TOLD = {  # in a card: in words
    "perplexity": "perplexity",
    "loss": "loss above the dense model, nats a token",
    "kl": "KL divergence (dense to this), nats a token",
    "kl_reverse": "KL divergence (this to dense)",
    "kl_999": "KL divergence that one token in 1000 exceeds",
    "share_over_0.1": "share of tokens with a KL divergence over 0.1",
    "agreement": "same likeliest token",
    "top5": "part of the five likeliest tokens in common",
    "same64": "of 64 greedy tokens, those before the first that the dense model has not",
    "repeated4": "share of 4-grams in them that occurred before",
    "repeated4_dense": "the same share in what the dense model writes",
    "length": f"tokens of a greedy answer, cut at {ANSWER}",
    "length_dense": "the same of the dense model",
}
SETTINGS = {"model", "against", "text", "tokens", "answers_only"}
FILES = ("config.json", "*.safetensors", "tokenizer*", "*.model", "vocab.*", "merges.txt")
# What two runs may differ in, and mean the same.
FREE = (
    "receipt.versions.",
    "receipt.hardware.",
    "receipt.settings.",
    "thirds.",
    "intervals.",
    "standard_error",
    "loss_error",
    "floor",
    "model",
    "against",
    "text",
)

# Figures.


def figures(found: Tokens, window: int) -> dict[str, Any]:
    """Figures by name, 95 % intervals of them, and some of them by position.

    Intervals are percentiles of a bootstrap over documents, or over windows where documents are
    few. They tell how the figures would vary with other text of the same kind, and nothing of other
    kinds. They are {} with one sample.
    """
    score, values = found.score(), found.values
    out: dict[str, Any] = {
        "tokens": len(values),
        "perplexity": score.perplexity,
        "standard_error": score.perplexity_error,
    }
    if score.kl is not None:
        kl = values[:, COLUMNS.index("kl")]
        values = torch.cat((values, (kl > LARGE_KL)[:, None].to(values.dtype)), 1)
        means = values.double().mean(0).tolist()
        names = [*COLUMNS, "share_over_0.1"]
        out |= {
            "kl": score.kl,
            "agreement": score.agreement,
            "loss": score.loss,
            "loss_error": score.loss_error,
        }
        out |= {n: m for n, m in zip(names, means, strict=True) if n not in out and n != "nll"}
        if len(kl) >= TAIL:
            out["kl_999"] = tail(
                kl, torch.zeros_like(found.document), torch.ones(1, 1).double()
            ).item()
    else:
        names = ["nll"]
    return out | {"intervals": intervals(found, values, names), "thirds": thirds(found, window)}


def intervals(found: Tokens, values: Tensor, names: Sequence[str]) -> dict[str, list[float]]:
    """A 95 % interval of the mean of each column of values (N, C), and of what follows from it."""
    sums, counts = found.sums(values)
    if len(counts) < 2:
        return {}
    weights = draws(len(counts))
    means = (weights @ sums) / (weights @ counts)[:, None]
    out = {name: means[:, column] for column, name in enumerate(names)}
    out = {"perplexity": out.pop("nll").exp()} | out
    if "kl" in out and len(values) >= TAIL:
        out["kl_999"] = tail(values[:, COLUMNS.index("kl")], found.samples(), weights)
    return {name: bounds(each) for name, each in out.items()}


def bounds(values: Tensor) -> list[float]:
    """What 95 % of values (D,) in fp64 lie between."""
    return values.quantile(torch.tensor((0.025, 0.975), dtype=values.dtype)).tolist()


def writing(
    texts: Tensor, dense: Tensor, answers: bool
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Figures of what two models wrote (P, T) after the same prompts, and their 95 % intervals.

    Means over prompts; intervals by a bootstrap over prompts, {} with one.

    answers: to messages, which are as long as the model finds right.
    """
    own, theirs = texts[:, :WRITTEN], dense[:, :WRITTEN]
    columns = {
        "same64": same_tokens(own, theirs).double(),
        "repeated4": repeated(own),
        "repeated4_dense": repeated(theirs),
    }
    if answers:
        columns["length"], columns["length_dense"] = (
            (t >= 0).sum(1).double() for t in (texts, dense)
        )
    means = {name: each.mean().item() for name, each in columns.items()}
    if len(texts) < 2:
        return means, {}
    weights = draws(len(texts)) / len(texts)
    return means, {name: bounds(weights @ each) for name, each in columns.items()}


def draws(samples: int) -> Tensor:
    """How often each sample is in each draw with replacement, (DRAWS, samples) fp64."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(samples, (DRAWS, samples), generator=generator)
    out = torch.zeros(DRAWS, samples, dtype=torch.float64)
    return out.scatter_add_(1, chosen, torch.ones_like(out))


def tail(values: Tensor, of: Tensor, weights: Tensor) -> Tensor:
    """The 99.9 % quantile of values (N,) in each draw (D,), where a value counts as often as its
    sample `of` (N,) does by the weights (D, S)."""
    share = weights @ of.bincount(minlength=weights.shape[1]).to(weights.dtype) / TAIL
    order, out = values.argsort(descending=True), []
    for some, need in zip(weights.split(50), share.split(50), strict=True):
        count = 16 * (len(order) // TAIL + 1)  # of the largest, which hold a thousandth as a rule
        while True:
            above = some[:, of[order[:count]]].cumsum(1)
            if count >= len(order) or (above[:, -1] >= need).all():
                break
            count *= 4
        out.append(values[order[(above < need[:, None]).sum(1)]].double())
    return torch.cat(out)


def table(receipt: Mapping[str, Any]) -> str:
    """The figures of a receipt that a model's card tells, as Markdown."""
    about = receipt["receipt"]
    versions, hardware = about["versions"], about["hardware"]
    hashes = about["hashes"]
    lines = ["## Measured", "", "| | | 95 % interval |", "|---|---|---|"]
    for name, words in TOLD.items():
        if receipt.get(name) is not None:
            ends = receipt["intervals"].get(name)
            between = "{:.4g} to {:.4g}".format(*ends) if ends else ""
            lines.append(f"| {words} | {receipt[name]:.4g} | {between} |")
    against = f", against {Path(receipt['against']).name}" if "against" in receipt else ""
    text = Path(receipt["text"]).name if about["settings"]["text"] else "Python standard library"
    lines += [
        "",
        f"On {receipt['tokens']} tokens ({text}; SHA-256 of the tokens "
        f"`{hashes['tokens'][:16]}`) in windows of {receipt['window']}{against}, by `anybit eval` "
        f"{versions['anybit']} with torch {versions['torch']} in {hardware['dtype']} on "
        f"{hardware['device']}.",
    ]
    return "\n".join(lines)


def thirds(found: Tokens, window: int) -> list[dict[str, Any]]:
    """Figures of the tokens with little, more and much context in a window of so many tokens."""
    out = []
    part = (found.context * THIRDS // window).clamp(max=THIRDS - 1)
    for third in range(THIRDS):
        own = found.values[part == third]
        means = own.double().mean(0).tolist() if len(own) else []
        names = [*COLUMNS[: own.shape[1]]] if len(own) else []
        before = [-(-window * third // THIRDS), -(-window * (third + 1) // THIRDS) - 1]
        row = {"context": before, "tokens": len(own)} | dict(zip(names, means, strict=True))
        out.append(row)
    return out


# What they depend on.


def file_hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_hashes(directory: Path) -> dict[str, str]:
    """SHA-256 of each file of a model that its figures depend on, by name."""
    files = {path for pattern in FILES for path in directory.glob(pattern) if path.is_file()}
    return {path.name: file_hash(path) for path in sorted(files)}


def token_hash(documents: Sequence[Tensor], counted: Sequence[Tensor] | None) -> str:
    """SHA-256 of token ids, of where documents end, and of which tokens count."""
    sha = hashlib.sha256(json.dumps([len(ids) for ids in documents]).encode())
    for part in (*documents, *(counted or ())):
        sha.update(part.cpu().to(torch.int64).numpy().tobytes())
    return sha.hexdigest()


# Repeating it.


def read_receipt(path: Path) -> dict[str, Any]:
    """A receipt that `anybit eval --json` wrote; InvalidInput for any other JSON."""
    found = read_json(path)
    try:
        settings, ends = found["receipt"]["settings"], found["intervals"].values()
        if settings.keys() != SETTINGS or any(len(end) != 2 for end in ends):
            raise KeyError
    except (KeyError, TypeError, AttributeError):
        raise InvalidInput(
            f"{path} is no receipt; `anybit eval MODEL --json FILE` writes one"
        ) from None
    return found


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[str], bool]:
    """What two receipts say differently, a line each, and whether the second confirms the first.

    It does when it is about the same files and tokens, and every figure is the same or lies in its
    interval. How long it took, the ends of intervals, and figures that the first does not have are
    not compared.
    """
    old, new = dict(leaves(then)), dict(leaves(now))
    lines, same = [], True
    for name in dict.fromkeys((*old, *new)):
        a, b = old.get(name), new.get(name)
        added = "." not in name and name not in old
        if a == b or added or name == "seconds" or name.startswith("intervals."):
            continue
        ends = then["intervals"].get(name)
        inside = ends is not None and b is not None and ends[0] <= b <= ends[1]
        same = same and (inside or name.startswith(FREE))
        shown = [f"{x:.6g}" if isinstance(x, float) else str(x)[:64] for x in (a, b)]
        note = ", within the interval" if inside else ""
        lines.append(f"{name}: {shown[0]} then, {shown[1]} now{note}")
    return lines, same


def leaves(value: object, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every value in JSON that holds no others, by its path."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from leaves(inner, f"{name}.{number}")
    else:
        yield name, None if isinstance(value, float) and math.isnan(value) else value
