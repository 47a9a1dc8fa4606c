"""Experts of models as anybit, humming and torch hold and multiply them, for `experts.py`."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from peers import FP8_BLOCKS, HUMMINGS_NAMES, MXFP4, NVFP4
from torch import Tensor

from anybit import quantize_tensor
from anybit.core.scheme import parse_scheme
from anybit.errors import InvalidInput
from anybit.kernels.cute import operands
from anybit.kernels.hopper import scalar_linear
from anybit.kernels.reference import quantize_tokens

DEVICE = torch.device("cuda")
HUMMING = [  # formats as ours are called and as humming's, and what tokens are
    ("int4:group=64", {"dtype": "uint4", "group_size": 64}, "int8"),
    ("int4:group=64", {"dtype": "uint4", "group_size": 64}, None),
    ("fp6", {"dtype": "float6e3m2", "group_size": 0}, None),
    ("mxfp4", MXFP4, None),
    ("mxfp4", MXFP4, "fp8"),
    ("nvfp4", NVFP4, None),
    ("fp8:group=128", FP8_BLOCKS, "fp8"),
]
GROUPED = ("grouped_contiguous", "indexed")  # humming's two ways
DIFFERENT = 8  # experts of different weights; the others are copies, which lie elsewhere


@dataclass
class ExpertShape:
    """Experts (n, k), of which each token meets `top`."""

    experts: int
    top: int
    n: int
    k: int


MODELS = {  # gate and up together, and down
    "Mixtral-8x7B": (ExpertShape(8, 2, 28672, 4096), ExpertShape(8, 2, 4096, 14336)),
    "Qwen3-30B-A3B": (ExpertShape(128, 8, 1536, 2048), ExpertShape(128, 8, 2048, 768)),
    "DeepSeek-V3": (ExpertShape(256, 8, 4096, 7168), ExpertShape(256, 8, 7168, 2048)),
    "Kimi-K2": (ExpertShape(384, 8, 4096, 7168), ExpertShape(384, 8, 7168, 2048)),
    "GPT-OSS-20B": (ExpertShape(32, 4, 5760, 2880), ExpertShape(32, 4, 2880, 2880)),
}


@dataclass
class Routing:
    """Which experts every token goes to: chosen (M, experts a token)."""

    chosen: Tensor
    experts: int

    def __post_init__(self) -> None:
        counts = torch.bincount(self.chosen.flatten(), minlength=self.experts)
        self.starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
        self.rows = self.chosen.flatten().argsort(stable=True)  # sorted row -> (token, choice)

    def sort(self, x: Tensor) -> Tensor:
        """x (M, K) -> its rows for every choice, sorted by expert."""
        return x[self.rows // self.chosen.shape[1]]


Run = Callable[[Any], Tensor]  # a weight -> the outputs of all choices


@dataclass
class Experts:
    """All experts' weights as one contestant holds them; see `bench.Layer`.

    run: (x (M, K), routing) -> how to multiply them with copies of the weight.
    seen: x -> the activation that is really multiplied, fp32.
    by_token: outputs come in the order of tokens and their choices, not sorted by expert.
    decoded: of each different weight.
    """

    peer: str
    format: str
    activation: str
    weight: Any
    nbytes: int
    decoded: Tensor
    run: Callable[[Tensor, Routing], Run]
    seen: Callable[[Tensor], Tensor] = lambda x: x.float()
    note: str = ""
    by_token: bool = False


def dense(w: Tensor, experts: int) -> Iterator[Experts]:
    """torch's grouped product in bf16."""
    weight = w.bfloat16()[owners(w, experts)]

    def run(x: Tensor, routing: Routing) -> Run:
        rows, ends = routing.sort(x), routing.starts[1:]
        return lambda weight: torch._grouped_mm(rows, weight.transpose(1, 2), offs=ends)

    yield Experts(
        "torch",
        "bf16",
        "bf16",
        weight,
        weight.nbytes,
        w.bfloat16().float(),
        run,
        note="_grouped_mm",
    )


def owners(w: Tensor, experts: int) -> list[int]:
    """Which of the different weights each expert has."""
    return [expert % len(w) for expert in range(experts)]


def of_all(tensor: Tensor, index: Tensor, different: int) -> Tensor:
    """A tensor of the different experts, one behind the other -> of all."""
    parts = tensor.view(torch.uint8).unflatten(0, (different, -1))
    return parts[index].flatten(0, 1).view(tensor.dtype)


def anybit(w: Tensor, experts: int, schemes: list[str]) -> Iterator[Experts]:
    """anybit's Hopper kernels, as a layer of the engine launches them."""
    dtype = torch.bfloat16
    for scheme in schemes:
        fmt, activation = parse_scheme(scheme)
        try:
            made = [quantize_tensor(expert, fmt) for expert in w]
        except InvalidInput as error:
            print(f"left out: {scheme}: {error}", flush=True)
            continue
        prepared = operands.prepare_experts(made, activation, dtype)
        index = torch.tensor(owners(w, experts), device=w.device)
        prepared = prepared._replace(
            layout=tuple(of_all(t, index, len(w)) for t in prepared.layout)
        )
        decoded = torch.stack([p.dequantize() for p in made])

        def launch(x: Tensor, routing: Routing, activation: str | None = activation) -> Run:
            rows, starts, scale, sums = routing.sort(x), routing.starts, None, None
            if activation is not None:
                rows, scale = quantize_tokens(rows, activation)
                sums = rows.sum(1, dtype=torch.int32)
                scale = scale.flatten()
            return lambda weight: scalar_linear.multiply(
                rows, scale, sums, weight, None, dtype, starts=starts
            )

        yield Experts(
            "anybit-hopper",
            fmt.spec,
            given(activation),
            prepared,
            experts * made[0].nbytes(),
            decoded,
            launch,
            seen_as(activation),
        )


def humming(
    w: Tensor, experts: int, tokens: list[int], top: int, formats: list[str]
) -> Iterator[Experts]:
    """humming's kernels over experts in both ways; tiles by its rules for each number of tokens."""
    for name, weight, activation in HUMMING:
        if name in formats:
            try:
                yield from humming_format(w, experts, tokens, top, name, weight, activation)
            except Exception as error:  # a shape or format that it does not take
                print(f"left out: humming {name}: {type(error).__name__}: {error}", flush=True)


def humming_format(
    w: Tensor,
    experts: int,
    tokens: list[int],
    top: int,
    name: str,
    weight: dict[str, Any],
    activation: str | None,
) -> Iterator[Experts]:
    """One of its formats."""
    from humming.forward import may_quant_input
    from humming.kernel.humming import HummingKernel
    from humming.layer import HummingLayer
    from humming.schema import HummingWeightSchema
    from humming.tune import get_heuristics_config

    different, n, k = w.shape
    inputs = {"dtype": HUMMINGS_NAMES[activation]} if activation else None
    layer = HummingLayer(
        n, k, dict(weight), inputs, num_experts=experts, torch_dtype=torch.bfloat16
    ).to(w.device)
    schema = layer.weight_schema
    tensors = HummingWeightSchema.quant_tensor(w.bfloat16(), schema, torch.bfloat16)
    decoded = schema.dequant_tensors(tensors).float()
    index = torch.tensor(owners(w, experts), device=w.device)
    layer.load_from_tensors({key: of_all(t, index, different) for key, t in tensors.items()})
    layer.transform()
    configs = {
        (way, m): get_heuristics_config(
            layer.humming_config, shape_m=m * top, gemm_type=way, device=w.device
        )
        for way in GROUPED
        for m in tokens
    }

    def compiled(key: tuple[str, int]) -> None:
        how = json.dumps({"gemm_type": key[0]})
        HummingKernel.prepare_kernels(
            layer.humming_config.to_str(), how, json.dumps(configs[key]), w.device
        )

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(compiled, configs))

    def seen(x: Tensor) -> Tensor:
        rows, scale = may_quant_input(layer.humming_config, x)
        return rows.float() if scale is None else rows.float() * scale.float().view(-1, 1)

    for way in GROUPED:

        def run(x: Tensor, routing: Routing, way: str = way) -> Run:
            config = configs[way, len(x)]
            rows, scale = may_quant_input(layer.humming_config, x)
            if way == "indexed":
                more = indexed(routing, config["block_shape"][0]) | {"top_k": top}
            else:
                rows = routing.sort(rows)
                scale = None if scale is None else routing.sort(scale)
                more = {"expert_layout": routing.starts.long()}
            return lambda layer: layer(
                rows,
                input_scale=scale,
                compute_config={"gemm_type": way},
                tuning_config=config,
                **more,
            )

        yield Experts(
            "humming",
            name,
            given(activation),
            layer,
            sum(p.nbytes for p in layer.parameters()),
            decoded,
            run,
            seen,
            way,
            way == "indexed",
        )


def indexed(routing: Routing, block: int) -> dict[str, Tensor]:
    """Rows of every expert padded to whole blocks, as humming and vLLM index them."""
    ids, owners = [], []
    starts, choices = routing.starts.tolist(), routing.chosen.numel()
    for expert, (a, b) in enumerate(pairwise(starts)):
        blocks = -(-(b - a) // block)
        part = routing.rows[a:b]
        ids.append(torch.nn.functional.pad(part, (0, blocks * block - len(part)), value=choices))
        owners += [expert] * blocks
    sorted_ids = torch.cat(ids).int()
    return {
        "sorted_ids": sorted_ids,
        "expert_ids": sorted_ids.new_tensor(owners),
        "num_tokens_padded": sorted_ids.new_tensor(len(sorted_ids)),
    }


def given(activation: str | None) -> str:
    return f"{activation}-given" if activation else "bf16"


def seen_as(activation: str | None) -> Callable[[Tensor], Tensor]:
    def seen(x: Tensor) -> Tensor:
        if activation is None:
            return x.float()
        codes, scale = quantize_tokens(x, activation)
        return codes.float() * scale

    return seen
