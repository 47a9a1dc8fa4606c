"""llama.cpp's mixtures of formats by name (q4_k_m): layers that need more bits get more.

And where a weight's width is no multiple of a format's block, a format of smaller blocks stands in.
Heads and embeddings stay as plans have them.
"""

import logging
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from anybit.core.names import ALIASES
from anybit.core.scheme import parse_scheme
from anybit.nn.plan import Plan, Spec, patterns_for

log = logging.getLogger(__name__)

MIXTURE = re.compile("q3_k_[sml]|q[45]_k_[sm]")
SMALLER = {"q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
VALUES = ("v_proj", "kv_b_proj", "qkv_proj", "query_key_value")
DOWN = ("down_proj", "w2")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


class Where(NamedTuple):
    """A layer's kind, by its last name; its number, of so many; and of how large a model it is."""

    kind: str
    at: int
    of: int
    experts: int
    large: bool


def format_in(mixture: str, layer: Where) -> str:
    """The K-quant that a mixture gives a layer whose width is a multiple of 256."""
    base, size = mixture.rpartition("_")[::2]
    at, of = layer.at, layer.of
    more = at < of // 8 or at >= 7 * of // 8 or (at - of // 8) % 3 == 2
    usual = "q6_k" if size == "m" and base != "q3_k" and more else base
    if layer.kind in VALUES:
        first = {"q3_k_m": "q5_k" if at < 2 else "q4_k", "q3_k_l": "q5_k"}
        first["q4_k_s"] = "q5_k" if at < 4 else base
        found = first.get(mixture, usual)
        if layer.large and found in ("q3_k", "q4_k"):
            found = "q5_k"
        return "q8_0" if layer.experts == 8 else found
    if layer.kind in DOWN:
        first = {"q3_k_m": "q5_k" if at < of // 16 else "q4_k", "q3_k_l": "q5_k"}
        first["q4_k_s"] = "q5_k" if at < of // 8 else base
        return first.get(mixture, usual)
    if layer.kind == "k_proj" and layer.experts == 8:
        return "q8_0"
    if layer.kind == "o_proj" and layer.experts == 8:
        return base if mixture == "q3_k_l" or base == "q5_k" else "q5_k"
    if layer.kind == "o_proj":
        return {"q3_k_m": "q4_k", "q3_k_l": "q5_k"}.get(mixture, base)
    return base


def unmixed(spec: Spec | Plan, shapes: Mapping[str, tuple[int, ...]], config: Any) -> Spec | Plan:
    """A plan with the formats of layers in place of mixtures; other specs as they are.

    Args:
        spec: As in `quantize_`.
        shapes: Shapes (N, K) of the layers that "*" means, by name.
        config: transformers' configuration of the model.
    """
    plan = {"*": spec} if isinstance(spec, str) else spec
    if not isinstance(plan, Mapping):
        return spec
    names = {p: str(s).strip().lower() for p, s in plan.items()}
    if not any(map(MIXTURE.fullmatch, names.values())):
        return spec
    out: dict[str, Spec | None] = {}
    for pattern, given in plan.items():
        mixture, others = names[pattern], dict[str, list[str]]()
        if not MIXTURE.fullmatch(mixture):
            out[pattern] = given
            continue
        out[pattern] = base = mixture.rpartition("_")[0]
        wanted = {n: s for n, s in shapes.items() if patterns_for(n, {pattern: base})}
        for name, layer in places(wanted, shapes, config).items():
            chosen = format_in(mixture, layer)
            fits = [c for c in (chosen, SMALLER.get(chosen)) if c and holds(c, shapes[name])]
            if not fits or fits[0] != chosen:
                others.setdefault(f"{fits[0] if fits else 'dense'} for {chosen}", []).append(name)
            if not fits or fits[0] != base:
                out[name] = fits[0] if fits else None
        for what, layers in others.items():
            log.warning(
                "%s, as in llama.cpp: %d layers, whose width is no multiple of its block: %s, ...",
                what,
                len(layers),
                layers[0],
            )
    return out


def places(wanted: Mapping[str, Any], shapes: Mapping[str, Any], config: Any) -> dict[str, Where]:
    """Where layers stand in a model, whose layers have these names."""
    config = config.get_text_config() if config is not None else None
    number = re.compile(r"\.(\d+)\.")
    layers = {n: int(found[1]) for n in shapes if (found := number.search(n))}
    values = [n for n in shapes if n.rpartition(".")[2] in VALUES]
    total = max(layers.values(), default=0) + 1
    experts = next((n for key in EXPERTS if (n := getattr(config, key, None))), 0)
    heads = getattr(config, "num_attention_heads", 0), getattr(config, "num_key_value_heads", 0)
    large = total == 80 and config.model_type in ("llama", "qwen2") and heads[0] != heads[1]
    out = {}
    for name in wanted:
        kind, at, of = name.rpartition(".")[2], layers.get(name, 0), total
        if kind in VALUES:
            at, of = values.index(name), len(values)
        out[name] = Where(kind, at, of, experts, large)
    return out


def holds(spec: str, shape: tuple[int, ...]) -> bool:
    """Whether a format's blocks fill the rows of a weight."""
    fmt = parse_scheme(ALIASES.get(spec, spec))[0]
    return shape[-1] % max(32, getattr(fmt, "block", fmt.group)) == 0
