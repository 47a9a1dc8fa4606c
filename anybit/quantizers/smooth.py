"""SmoothQuant and its relatives: move the size of activation channels into the weights.

x W^T = (x / s) (W * s)^T for any s > 0 per channel. Dividing is free where the channel's size comes
from a norm's gain or from the rows of the linear layer before, and s is chosen by a grid search on
the output error of the quantized layers (LiquidGEMM section 6, after Outlier Suppression+).
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from anybit.dispatch import parse_scheme
from anybit.experts import Expert, Experts
from anybit.format import Format, Packed
from anybit.kernels.reference import quantized_activation
from anybit.quantizers.calibrate import Calibrated
from anybit.quantizers.replay import SAMPLE, Seen
from anybit.quantizers.rtn import RTN

# What comes before, and the linear layers that read it. The first that a block has, and that
# leaves its function as it was, is used for each layer.
PAIRS = (
    ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("input_layernorm", ("self_attn.qkv_proj",)),
    ("self_attn_layer_norm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("pre_feedforward_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    ("post_attention_layernorm", ("mlp.gate_up_proj",)),
    ("final_layer_norm", ("fc1",)),
    ("self_attn.v_proj", ("self_attn.o_proj",)),
    ("self_attn.v_proj", ("self_attn.out_proj",)),
    ("mlp.up_proj", ("mlp.down_proj",)),
)
STEPS = tuple(step / 10 for step in range(1, 10))


@dataclass(frozen=True)
class Smooth(Calibrated):
    """Smooth the activations of a block, then quantize with another quantizer.

    then: RTN, Clip, HQQ or GPTQ (without text of its own).

    The scale of every pair of `PAIRS` is searched among SmoothQuant's max|x|^a / max|w|^(1 - a),
    AWQ's mean|x|^a, Outlier Suppression+'s max(1, max|x| / t) and no scale at all. A pair whose
    folding changes what the block computes (an architecture with other readers of a norm) is
    left alone, with a warning.
    """

    then: RTN | Calibrated = field(default_factory=RTN)

    def wanted(self) -> tuple[str, ...]:
        more = self.then.wanted() if isinstance(self.then, Calibrated) else ()
        return ("largest", "mean", "sample", *more)

    def quantize(self, w: Tensor, fmt: Format, seen: Seen) -> Packed:
        if isinstance(self.then, Calibrated):
            return self.then.quantize(w, fmt, seen)
        return self.then.quantize(w, fmt)

    def transform(
        self,
        block: nn.Module,
        schemes: Mapping[str, str],
        seen: dict[str, Seen],
        output: Callable[[], Tensor],
    ) -> dict[str, Seen]:
        modules = dict(block.named_modules())
        smoothed: set[str] = set()
        seen = dict(seen)
        for before, after in (*PAIRS, *expert_pairs(modules)):
            readers = [name for name in after if name in modules]
            known = [name for name in readers if name in schemes and seen[name].tokens]
            if before not in modules or not known or smoothed & set(readers):
                continue
            heads = shared_heads(modules, before, known[0])
            layers = {name: cast(nn.Linear, modules[name]) for name in readers}
            distinct = {id(seen[name]): seen[name] for name in known}
            s = search(
                {name: (layers[name].weight.detach(), schemes[name]) for name in known},
                merged(list(distinct.values())),
                heads,
            )
            # What an expert computes needs no check, which would take longer than the search.
            inside = isinstance(modules[before.rpartition(".")[0]], Expert)
            computed = (lambda: torch.ones(1, 1)) if inside else output
            if bool((s == 1).all()):
                smoothed |= set(readers)
            elif fold(modules[before], list(layers.values()), s, heads, computed):
                smoothed |= set(readers)
                divided = {key: statistics.divided(s) for key, statistics in distinct.items()}
                seen |= {name: divided[id(seen[name])] for name in known}
            else:
                warnings.warn(
                    f"Smooth left {before} -> {', '.join(readers)} as they are: folding a scale "
                    "there changes what the block computes, so something else reads the same "
                    "activations",
                    stacklevel=2,
                )
        return seen


def expert_pairs(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """More `PAIRS`: those of a block's experts. A router reads the norm's output as well."""
    for name, experts in modules.items():
        if not isinstance(experts, Experts):
            continue
        mixture = name.rpartition(".")[0]
        shared = f"{mixture}.shared_expert"
        gate, up, down = cast(Expert, experts[0]).names
        first = [f"{name}.{e}.{key}" for e in range(len(experts)) for key in (gate, up)]
        others = (f"{shared}.gate_proj", f"{shared}.up_proj", f"{shared}_gate", f"{mixture}.gate")
        yield "post_attention_layernorm", (*first, *others)
        yield f"{shared}.up_proj", (f"{shared}.down_proj",)
        for e in range(len(experts)):
            yield f"{name}.{e}.{up}", (f"{name}.{e}.{down}",)


def merged(seen: list[Seen]) -> Seen:
    """What several layers saw, as if it were one; a sample as large as one layer's."""
    if len(seen) == 1:
        return seen[0]
    tokens = sum(one.tokens for one in seen)
    sample = torch.cat([one.sample for one in seen])
    return Seen(
        tokens,
        largest=torch.stack([one.largest for one in seen]).amax(0),
        mean=torch.stack([one.mean * (one.tokens / tokens) for one in seen]).sum(0),
        sample=sample[:: -(-len(sample) // SAMPLE)],
    )


def search(
    weights: Mapping[str, tuple[Tensor, str]], seen: Seen, heads: tuple[int, int, int] | None
) -> Tensor:
    """The scale s (K,) fp32 of least output error over a sample of inputs.

    weights: (w, scheme) of every quantized layer that reads the input. heads: (kv_heads, repeats,
    head_dim) when several channels of the input come from one row of the layer before.
    """
    x = seen.sample.float()
    dense = {name: w.float() for name, (w, _) in weights.items()}
    widest = torch.stack([w.abs().amax(0) for w in dense.values()]).amax(0)
    schemes = {name: parse_scheme(scheme) for name, (_, scheme) in weights.items()}
    best, least = torch.ones_like(widest), torch.inf
    for s in candidates(*(shared(t, heads) for t in (seen.largest, seen.mean, widest))):
        error = 0.0
        for name, w in dense.items():
            fmt, activation = schemes[name]
            rounded = RTN().quantize(w * s, fmt).dequantize()
            y = quantized_activation(x / s, activation) @ rounded.T
            error += float((y - x @ w.T).square().sum())
        if error < least:
            best, least = s, error
    return best


def candidates(largest: Tensor, mean: Tensor, widest: Tensor) -> Iterator[Tensor]:
    """Scales (K,) to try, from max|x|, mean|x| and max|w| of every channel; first, none at all."""
    largest, mean, widest = (t.clamp_min(1e-4 * float(t.max())) for t in (largest, mean, widest))
    yield torch.ones_like(largest)
    if not all(float(t.min()) > 0 for t in (largest, mean, widest)):
        return  # nothing but zeros
    for step in STEPS:
        yield centred(largest**step / widest ** (1 - step))
        yield centred(mean**step)
        yield (largest / (step * largest.max())).clamp_min(1)


def centred(s: Tensor) -> Tensor:
    """s with its extremes at equal distance from 1, so that weights keep their size."""
    return s / (s.max() * s.min()).sqrt()


def shared(t: Tensor, heads: tuple[int, int, int] | None) -> Tensor:
    """The largest of the channels (K,) that must share a scale, for each of them."""
    if heads is None:
        return t
    return t.view(heads).amax(1, keepdim=True).expand(heads).flatten()


def shared_heads(
    modules: Mapping[str, nn.Module], before: str, after: str
) -> tuple[int, int, int] | None:
    """(kv_heads, repeats, head_dim) when query heads share value heads (GQA), else None."""
    source, reader = modules[before], cast(nn.Linear, modules[after])
    if not isinstance(source, nn.Linear) or source.out_features == reader.in_features:
        return None
    width = int(getattr(modules[before.rpartition(".")[0]], "head_dim", source.out_features))
    return (source.out_features // width, reader.in_features // source.out_features, width)


def fold(
    before: nn.Module,
    readers: list[nn.Linear],
    s: Tensor,
    heads: tuple[int, int, int] | None,
    output: Callable[[], Tensor],
) -> bool:
    """Divide what `before` puts out by s and multiply its readers' columns by it.

    Parameters are replaced, not written to. True when `output`, what the block computes, stayed
    the same within the dtype's precision; otherwise everything is as it was.
    """
    old = [(m, dict(m._parameters)) for m in (before, *readers)]
    want = output()
    rows = s if heads is None else s.view(heads)[:, 0].flatten()
    for reader in readers:
        put(reader, "weight", reader.weight * s)
    # Some norms (Gemma's) multiply by 1 + weight.
    for one in (0.0,) if isinstance(before, nn.Linear) else (0.0, 1.0):
        for name, value in old[0][1].items():
            if value is not None:
                by = rows[:, None] if value.ndim == 2 else rows
                extra = one if name == "weight" else 0.0
                put(before, name, (value.float() + extra) / by - extra)
        if same(want, output()):
            return True
    for module, parameters in old:
        module._parameters = parameters
    return False


def put(module: nn.Module, name: str, value: Tensor) -> None:
    """Give a module a new parameter, in the dtype of the one that it replaces."""
    dtype = cast(Tensor, getattr(module, name)).dtype
    module._parameters[name] = nn.Parameter(value.to(dtype), requires_grad=False)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether hidden states are equal up to the dtype's precision, at the median token."""
    # The median, since a few tokens of large models are thousands of times longer than the rest.
    a, b = a.flatten(0, -2), b.flatten(0, -2)
    error = (a.float() - b.float()).norm(dim=1) / a.float().norm(dim=1).clamp_min(1e-12)
    return float(error.median()) < max(1e-4, 2 * torch.finfo(a.dtype).eps)
