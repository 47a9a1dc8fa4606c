"""Rotations that cost nothing at run time: folded into a dense model's own weights.

RMSNorm without gains commutes with every rotation of its input (SliceGPT,
https://arxiv.org/abs/2401.15024). So gains move into the weights that read a norm's output, and the
residual stream into a basis in which no channel stands out (QuaRot,
https://arxiv.org/abs/2404.00456): whatever writes to it is rotated, and whatever reads it back.
Values are rotated head by head, since attention adds them up with one number for all channels.

What no fold reaches is the input of the down projections, a product of two other outputs.
"""

import copy
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from anybit.core.rotation import SMALLEST, hadamard, signs
from anybit.errors import Unsupported, in_a_line, probing
from anybit.nn.model import (
    Module,
    check_module,
    quantized_layers,
    refuse_adapters,
    restored_on_error,
)
from anybit.nn.tied import output_embeddings, shared_weights, untied, untied_heads

MLP = r"(?:mlp|block_sparse_moe)\.(?:\w+\.)*"
ATTENTION_NORM, MLP_NORM = "input_layernorm.weight", "post_attention_layernorm.weight"
# What the parameters of a block do with the residual stream, by patterns of their names.
READS = {
    ATTENTION_NORM: r"self_attn\.(?:[qkv]|qkv|q_a|kv_a)_proj(?:_with_mqa)?\.weight",
    MLP_NORM: MLP
    + r"(?:(?:gate|up|gate_up)_proj(?:\.weight)?|(?:gate|router|shared_expert_gate)\.weight)",
}
WRITES = r"self_attn\.o_proj\.weight|" + MLP + r"down_proj(?:\.weight)?"
ADDS = r"self_attn\.o_proj\.bias|" + MLP + r"down_proj\.bias"
NEITHER = (
    r"self_attn\.(?:\w+_proj(?:_with_mqa)?\.bias|[qk]_norm\.weight|sinks)|"
    r"self_attn\.(?:(?:q|kv)_a_layernorm|(?:q|kv)_b_proj)\.weight|" + MLP + r"\w+\.bias"
)
Step = Callable[[Tensor], Tensor]
CLOSE = 1e-3  # relative difference of what blocks add in fp32, far above that of rounding
SAME = 0.2  # of a token's logits, in the median, in the model's dtype
TRIED = 16  # tokens


def rotate_(model: Module) -> Module:
    """Rotate a dense model's residual stream and values in place; it computes what it did before.

    Quantize it afterwards, in formats without `rotate`, but for the down projections, whose inputs
    cannot be folded: `{"*": "trellis", "*.down_proj": "trellis:rotate=k"}`. It stays a model of its
    class, so checkpoints (`save_pretrained`, then `anybit quantize`), kernels and servers need not
    know. Norms' gains become ones. Blocks of the rotation have as many channels as the largest
    power of two that divides the size.

    Weights are rounded to their dtype once more. Memory: a second copy of the weights meanwhile. An
    error or an interrupt leaves the model as it was. A head that shares the embeddings' weight gets
    one of its own.

    Args:
        model: A dense causal language model of transformers with RMSNorm before attention and MLP
            (Llama, Mistral, Qwen, Phi-3, DeepSeek, mixtures of experts among them). One of each
            kind of its blocks is tried first, in fp32; logits of a few tokens are compared last.

    Returns:
        The model.

    Raises:
        Unsupported: The model has parts that no rotation passes through, is quantized, or a copy of
            its blocks computes something else when rotated. The message names what.
    """
    check_module(model, "rotate_")
    refuse_adapters(model)
    if any(True for _ in quantized_layers(model)):
        raise Unsupported("the model is quantized; rotate the dense one, then quantize it")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise Unsupported("the model has no weights yet (meta device or offloaded); load it first")
    base, embeddings, head = parts_of(model)
    rehearse(base, embeddings)
    names, before = output_embeddings(model), logits(model)
    with (
        restored_on_error(model),
        untied(model, untied_heads(model, dict.fromkeys(names))),
        torch.no_grad(),
    ):
        if shared := {*shared_weights(model)} & names:
            raise Unsupported(f"{', '.join(shared)} shares its weight; load the model untied")
        gain = base.norm.weight.float()
        change(embeddings, "weight", turned)
        change(head, "weight", partial(reading, gain=gain))
        rotate_blocks(base)
        apart = ((logits(model) - before).norm(dim=-1) / before.norm(dim=-1)).median()
        if not apart < SAME:
            raise Unsupported(
                f"{type(model).__name__} cannot be rotated: its logits become others (relative "
                f"difference {apart:.2g}); use a format with rotate=k instead"
            )
    return model


def logits(model: nn.Module) -> Tensor:
    """Of a few tokens (tokens, vocabulary), fp32; the model's mode stays."""
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    ids = torch.arange(TRIED, device=embeddings.weight.device) * 7 % len(embeddings.weight)
    with restored_on_error(model), torch.no_grad():
        out: Tensor = model.eval()(input_ids=ids[None], use_cache=False).logits[0]
    return out.float()


def parts_of(model: nn.Module) -> tuple[Any, nn.Module, nn.Module]:
    """The decoder, the embeddings and the head; Unsupported unless that is all the model has."""
    base: Any = getattr(model, "model", None)
    kind = type(model).__name__
    for name in ("embed_tokens", "layers", "norm"):
        if not isinstance(getattr(base, name, None), nn.Module):
            raise Unsupported(
                f"{kind} cannot be rotated: it has no model.{name}, which models built like Llama "
                "have; use a format with rotate=k instead"
            )
    head = getattr(model, "lm_head", None)
    if not isinstance(head, nn.Linear):
        raise Unsupported(f"{kind} cannot be rotated: it has no lm_head that is an nn.Linear")
    parts = [part for block in base.layers for part in block.modules()]
    if len(parts) != len(set(parts)):
        raise Unsupported(
            f"{kind} cannot be rotated: its blocks share modules; use a format with rotate=k "
            "instead"
        )
    known = {*base.embed_tokens.parameters(), *head.parameters(), *base.norm.parameters()}
    for name, parameter in model.named_parameters():
        if parameter not in known and not name.startswith("model.layers."):
            raise Unsupported(
                f"{kind} cannot be rotated: what its {name} does with the residual stream is not "
                "known; use a format with rotate=k instead"
            )
    for index, block in enumerate(base.layers):
        found = dict(block.named_parameters())
        if lacks := [norm for norm in READS if norm not in found]:
            raise Unsupported(
                f"{kind} cannot be rotated: its model.layers.{index} has no {lacks[0]}, an RMSNorm "
                "that models built like Llama have; use a format with rotate=k instead"
            )
        for name, parameter in found.items():
            if role(name, parameter, base.config.hidden_size) is None:
                raise Unsupported(
                    f"{kind} cannot be rotated: what its model.layers.{index}.{name} of shape "
                    f"{tuple(parameter.shape)} does with the residual stream is not known; use a "
                    "format with rotate=k instead"
                )
    hidden = base.config.hidden_size
    if hidden & -hidden < SMALLEST:
        raise Unsupported(
            f"{kind} cannot be rotated: no power of two from {SMALLEST} on divides its "
            f"{hidden} channels"
        )
    return base, base.embed_tokens, head


def role(name: str, parameter: Tensor, hidden: int) -> str | None:
    """What a block's parameter does: a norm's name if it reads that norm's output, "norm", "write",
    "add", or "" for nothing to the stream; None if that is not known.
    """
    shape = parameter.shape
    for norm, pattern in READS.items():
        if name == norm:
            return "norm"
        if re.fullmatch(pattern, name):
            return norm if shape[-1] == hidden else None
    if re.fullmatch(WRITES, name):
        return "write" if len(shape) > 1 and shape[-2] == hidden else None
    if re.fullmatch(ADDS, name):
        return "add" if shape[-1] == hidden else None
    return "" if re.fullmatch(NEITHER, name) else None


def rotate_blocks(base: Any) -> None:
    """Rotate what the blocks of a decoder read and write, and take all norms' gains."""
    hidden = base.config.hidden_size
    for block in base.layers:
        found = dict(block.named_parameters())
        gains = {name: found[name].float() for name in READS}
        of_values = values_of(found, gains[ATTENTION_NORM], base.config)
        for name, parameter in found.items():
            does = role(name, parameter, hidden)
            steps: list[Step] = []
            if does in gains:
                steps.append(partial(reading, gain=gains[does]))
            elif does == "norm":
                steps.append(torch.ones_like)
            elif does == "write":
                steps.append(lambda w: turned(w.transpose(-1, -2)).transpose(-1, -2))
            elif does == "add":
                steps.append(turned)
            if name in of_values:
                steps.append(of_values[name])
            owner, _, own = name.rpartition(".")
            change(block.get_submodule(owner), own, *steps)
    change(base.norm, "weight", torch.ones_like)


def values_of(found: Mapping[str, Tensor], gain: Tensor, config: Any) -> dict[str, Step]:
    """What rotates each head's values, and what reads them, by the names of a block's parameters.

    Before that, a value's channel is as large as the weights that read it, up to powers of two:
    rounding errors of a large channel would be spread over small ones that count as much.
    Nothing where heads have an odd size, or are made of a latent vector.

    Args:
        found: Parameters of the block.
        gain: Of the norm before attention.
        config: Of the model.
    """
    first = next((n for n in ("v", "qkv") if f"self_attn.{n}_proj.weight" in found), None)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if first is None or dim & -dim < SMALLEST:
        return {}
    prefix, out = f"self_attn.{first}_proj", "self_attn.o_proj.weight"
    count = config.num_key_value_heads * dim
    made = (found[f"{prefix}.weight"][-count:].float() * gain).norm(dim=1).view(-1, 1, dim)
    read = found[out].float().unflatten(1, (len(made), -1, dim)).norm(dim=0)
    ratio = (made / read.norm(dim=1, keepdim=True)).sqrt().log2().round().exp2()
    ratio = torch.where(ratio.isfinite() & (ratio > 0), ratio, 1.0)

    def values(w: Tensor) -> Tensor:
        """The last rows are those of the values."""
        own = w[-count:].movedim(0, -1) / ratio.flatten()
        own = turned(own.unflatten(-1, (-1, dim))).flatten(-2).movedim(-1, 0)
        return torch.cat((w[:-count], own))

    def readers(w: Tensor) -> Tensor:
        return turned(w.unflatten(-1, (len(made), -1, dim)) * ratio).flatten(-3)

    return {f"{prefix}.weight": values, f"{prefix}.bias": values, out: readers}


def reading(w: Tensor, gain: Tensor) -> Tensor:
    """A weight (..., N, K) that reads a norm's rotated output, without the norm's gain (K,)."""
    return turned(w * gain)


def turned(x: Tensor) -> Tensor:
    """H (signs * x) on the last dimension of x, in fp32, with the largest blocks that divide it."""
    size = x.shape[-1]
    x = x.float() * signs(size).to(x.device).float()
    largest = size & -size
    inner = min(largest, 128)
    for part in (hadamard(inner), hadamard(largest // inner)):  # H of a product of sizes
        x = x.unflatten(-1, (size // largest, -1, len(part)))
        x = (x @ part.to(x.device)).transpose(-1, -2).flatten(-3)
    return x


def change(module: nn.Module, name: str, *steps: Step) -> None:
    """Put a new parameter in an old one's place, of its dtype; without steps, keep the old one."""
    old = module._parameters[name]
    if not steps or old is None:
        return
    value = old.detach().float()
    for step in steps:
        value = step(value)
    module._parameters[name] = nn.Parameter(value.to(old.dtype).contiguous(), old.requires_grad)


def rehearse(base: Any, embeddings: nn.Module) -> None:
    """Raise Unsupported unless a copy of the blocks, one of each kind, can be rotated."""
    kinds: dict[Any, nn.Module] = {}
    for block in base.layers:
        shapes = tuple((n, p.shape) for n, p in block.named_parameters())
        types = tuple(type(part) for part in block.modules())
        kinds.setdefault((shapes, types, getattr(block, "attention_type", None)), block)
    config = copy.deepcopy(base.config)
    config._attn_implementation = "eager"  # which takes fp32, as not all others do
    memo: dict[int, Any] = {id(base.config): config, id(embeddings): nn.Identity()}
    memo[id(base.layers)] = nn.ModuleList(copy.deepcopy(b, memo) for b in kinds.values())
    small = copy.deepcopy(base, memo).float().eval()
    random = torch.Generator().manual_seed(0)
    x = torch.randn(2, 8, base.config.hidden_size, generator=random, dtype=torch.float32)
    x = x.to(base.norm.weight.device)

    def output(x: Tensor) -> Tensor:
        out: Tensor = small(inputs_embeds=x, use_cache=False)[0]
        return out

    with torch.no_grad(), probing():
        change(small.norm, "weight", torch.ones_like)
        try:
            before, kept = turned(output(x)), turned(small.norm(x))
            rotate_blocks(small)
            after = output(turned(x))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of a model that wants more than hidden states
            raise Unsupported(
                f"{type(base).__name__} cannot be rotated: a copy of its blocks does not run "
                f"({in_a_line(error)}); use a format with rotate=k instead"
            ) from error
    added = max((before - kept).norm(), 1e-4 * before.norm())
    apart = float((after - before).norm() / added)
    if not apart < CLOSE:
        raise Unsupported(
            f"{type(base).__name__} cannot be rotated: its rotated blocks compute something else "
            f"(relative difference {apart:.2g}); use a format with rotate=k instead"
        )
