"""SmoothQuant and its relatives: move the size of activation channels into the weights.

x W^T = (x / s) (W * s)^T for any s > 0 per channel. Dividing is free where the channel's size comes
from a norm's gain or from the rows of the linear layer before, and s is chosen by a grid search on
the output error of the quantized layers (LiquidGEMM section 6, after Outlier Suppression+).
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from anybit.core.scheme import parse_scheme
from anybit.errors import Unsupported
from anybit.kernels.between import seen_by
from anybit.nn.experts import Expert, Experts
from anybit.quantizers.base import Block, quantize_weight
from anybit.quantizers.before import Before
from anybit.quantizers.calibration.statistics import SAMPLE, Statistics
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
class Smooth(Before):
    """Smooth the activations of a block, then quantize with another quantizer.

    The scale of every pair of `PAIRS` is searched among SmoothQuant's max|x|^a / max|w|^(1 - a),
    AWQ's mean|x|^a, Outlier Suppression+'s max(1, max|x| / t) and no scale at all. A pair whose
    folding changes what the block computes (an architecture with other readers of a norm) is
    left alone, with a warning.

    Attributes:
        calibration: Texts, token ids or a file, or a `Calibration` that says more about them.
        then: Any other quantizer; one that is calibrated gets the same data.
    """

    def __post_init__(self) -> None:
        if "gradients" in self.then.needs:
            raise Unsupported(
                "Smooth changes the outputs whose gradients were found before; smooth without "
                "gradients=True, or rotate"
            )

    @property
    def needs(self) -> tuple[str, ...]:
        """Of the search, and of `then`."""
        return ("amax", "mean_abs", "sample", *super().needs)

    def transform(self, block: Block) -> Mapping[str, Statistics]:
        """Smooth the block, then transform it as `then` does."""
        modules, schemes = dict(block.module.named_modules()), block.schemes
        smoothed: set[str] = set()
        statistics = dict(block.statistics)
        for before, after in (*PAIRS, *expert_pairs(modules)):
            readers = [name for name in after if name in modules]
            known = [name for name in readers if name in schemes and statistics[name].tokens]
            if before not in modules or not known or smoothed & set(readers):
                continue
            heads = shared_heads(modules, before, known[0])
            layers = {name: cast(nn.Linear, modules[name]) for name in readers}
            distinct = {id(statistics[name]): statistics[name] for name in known}
            s = search(
                {name: (layers[name].weight.detach(), schemes[name]) for name in known},
                merged(list(distinct.values())),
                heads,
            )
            # What an expert computes needs no check, which would take longer than the search.
            inside = isinstance(modules[before.rpartition(".")[0]], Expert)
            computed = (lambda: torch.ones(1, 1)) if inside else block.output
            if bool((s == 1).all()):
                smoothed |= set(readers)
            elif fold(modules[before], list(layers.values()), s, heads, computed):
                smoothed |= set(readers)
                divided = {key: one.divided(s) for key, one in distinct.items()}
                statistics |= {name: divided[id(statistics[name])] for name in known}
            else:
                warnings.warn(
                    f"Smooth left {before} -> {', '.join(readers)} as they are: folding a scale "
                    "there changes what the block computes, so something else reads the same "
                    "activations",
                    stacklevel=2,
                )
        return self.then.transform(block._replace(statistics=statistics))


def expert_pairs(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """More `PAIRS`: those of a block's experts. A router reads the norm's output as well."""
    for name, experts in modules.items():
        if not isinstance(experts, Experts) or len(cast(Expert, experts[0]).names) != 3:
            continue
        mixture = name.rpartition(".")[0]
        shared = f"{mixture}.shared_expert"
        gate, up, down = cast(Expert, experts[0]).names
        first = [f"{name}.{e}.{key}" for e in range(len(experts)) for key in (gate, up)]
        others = (f"{shared}.gate_proj", f"{shared}.up_proj", f"{shared}_gate", f"{mixture}.gate")
        yield "post_attention_layernorm", (*first, *others)
        yield f"{shared}.up_proj", (f"{shared}.down_proj",)
        for e in range(len(experts) if experts.layout.gate == "plain" else 0):
            yield f"{name}.{e}.{up}", (f"{name}.{e}.{down}",)


def merged(statistics: list[Statistics]) -> Statistics:
    """Statistics of several inputs as one, without the Hessian; a sample as large as one's."""
    if len(statistics) == 1:
        return statistics[0]
    tokens = sum(one.tokens for one in statistics)
    sample = torch.cat([one.sample for one in statistics])
    return Statistics(
        tokens,
        amax=torch.stack([one.amax for one in statistics]).amax(0),
        mean_abs=torch.stack([one.mean_abs * (one.tokens / tokens) for one in statistics]).sum(0),
        sample=sample[:: -(-len(sample) // SAMPLE)],
    )


def search(
    weights: Mapping[str, tuple[Tensor, str]],
    statistics: Statistics,
    heads: tuple[int, int, int] | None,
) -> Tensor:
    """Search the scale of least output error over a sample of inputs.

    Args:
        weights: (w, scheme) of every quantized layer that reads the input, w (N, K).
        statistics: Of the input: amax, mean_abs and sample.
        heads: (kv_heads, repeats, head_dim) when several channels of the input come from one row
            of the layer before (GQA).

    Returns:
        s (K,) fp32; all ones when no scale is better.
    """
    x = statistics.sample.float()
    dense = {name: w.float() for name, (w, _) in weights.items()}
    wanted = {name: x @ w.T for name, w in dense.items()}
    weight_amax = torch.stack([w.abs().amax(0) for w in dense.values()]).amax(0)
    schemes = {name: parse_scheme(scheme) for name, (_, scheme) in weights.items()}
    best, least = torch.ones_like(weight_amax), torch.inf
    for s in candidates(
        *(shared(t, heads) for t in (statistics.amax, statistics.mean_abs, weight_amax))
    ):
        error = 0.0
        for name, w in dense.items():
            fmt, activation = schemes[name]
            packed = quantize_weight(RTN(), w * s, fmt)
            y = seen_by(packed, x / s, activation) @ packed.dequantize().T
            error += float((y - wanted[name]).square().sum())
        if error < least:
            best, least = s, error
    return best


def candidates(amax: Tensor, mean: Tensor, weight_amax: Tensor) -> Iterator[Tensor]:
    """Scales (K,) to try, from max|x|, mean|x| and max|w| of every channel; first, none at all."""
    amax, mean, weight_amax = (
        t.clamp_min(1e-4 * float(t.max())) for t in (amax, mean, weight_amax)
    )
    yield torch.ones_like(amax)
    if not all(float(t.min()) > 0 for t in (amax, mean, weight_amax)):
        return  # nothing but zeros
    for step in STEPS:
        yield centred(amax**step / weight_amax ** (1 - step))
        yield centred(mean**step)
        yield (amax / (step * amax.max())).clamp_min(1)


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
    """(kv_heads, repeats, head_dim) when query heads share value heads (GQA), else None.

    Args:
        modules: The block's modules by name.
        before: Name of the layer whose output the other reads.
        after: Name of the linear layer that reads it.
    """
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
    """Divide the output of `before` by s, and multiply its readers' columns by it.

    Parameters are replaced, not written to.

    Args:
        before: A norm or a linear layer.
        readers: The linear layers that read its output.
        s: The scale (K,).
        heads: As in `search`.
        output: Computes the block's output.

    Returns:
        Whether the block's output stayed the same within the dtype's precision; if not, everything
        is as it was.
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
