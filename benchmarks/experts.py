"""Time the products of a mixture of experts in one run: anybit, humming and torch.

    python benchmarks/experts.py --out benchmarks/results/h200_experts.csv

Tokens are sorted by expert beforehand, and quantized beforehand where they are 8 bits. Every result
is compared with one product for each expert before it is timed. Compiling (humming's kernels) comes
first. Needs kernels in ANYBIT_CACHE or CuTe DSL; humming is left out where it is not installed.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anybit import quantize_tensor
from anybit.core.scheme import parse_scheme
from anybit.kernels.cute import operands
from anybit.kernels.hopper import scalar_linear, tiles
from anybit.kernels.hopper.tiles import Tile
from anybit.kernels.reference import quantize_tokens
from anybit.measure import bench
from anybit.measure.timing import ReadFloor, median_us, rotated

DEVICE = torch.device("cuda")
SCHEMES = ["liquid@int8", "int8@int8", "int4:group=128", "fp6"]
HUMMING = [("int4:group=64", 4, 64, "int8"), ("int4:group=128", 4, 128, None)]
GROUPED = ("grouped_contiguous", "indexed")  # humming's two ways


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


def dense(w: Tensor) -> Iterator[Experts]:
    """torch's grouped product in bf16."""
    weight = w.bfloat16()

    def run(x: Tensor, routing: Routing) -> Run:
        rows, ends = routing.sort(x), routing.starts[1:]
        return lambda weight: torch._grouped_mm(rows, weight.transpose(1, 2), offs=ends)

    yield Experts(
        "torch", "bf16", "bf16", weight, weight.nbytes, weight.float(), run, note="_grouped_mm"
    )


def anybit(w: Tensor, schemes: list[str], sweep: bool) -> Iterator[Experts]:
    """anybit's Hopper kernels, as a layer of the engine launches them; or with every tile."""
    dtype = torch.bfloat16
    for scheme in schemes:
        fmt, activation = parse_scheme(scheme)
        packed = [quantize_tensor(expert, fmt) for expert in w]
        prepared = scalar_linear.prepare_experts(packed, activation, dtype)
        decoded = torch.stack([p.dequantize() for p in packed])

        def launch(
            x: Tensor,
            routing: Routing,
            activation: str | None = activation,
            tile: Tile | None = None,
            overlap: bool | None = None,
        ) -> Run:
            rows, starts, scale, sums = routing.sort(x), routing.starts, None, None
            if activation is not None:
                rows, scale = quantize_tokens(rows, activation)
                sums = rows.sum(1, dtype=torch.int32)
                scale = scale.flatten()
            return lambda weight: scalar_linear.multiply(
                rows, scale, sums, weight, None, dtype, tile, overlap, starts
            )

        plans: list[tuple[Tile | None, bool | None]] = [(None, None)]
        if sweep:
            operand = getattr(torch, operands.operand_of(activation, dtype))
            family = tiles.family_grouped(operands.decoder_for(fmt, operand))
            plans = [*product(family, (False, True))]
        for tile, overlap in plans:
            yield Experts(
                "anybit-hopper",
                fmt.spec,
                given(activation),
                prepared,
                sum(p.nbytes() for p in packed),
                decoded,
                partial(launch, tile=tile, overlap=overlap),
                seen_as(activation),
                f"{'pdl' if overlap else 'plain'} sweep: {tile.name}" if tile else "",
            )


def humming(w: Tensor, tokens: list[int], top: int) -> Iterator[Experts]:
    """humming's kernels over experts in both ways; tiles by its rules for each number of tokens."""
    from humming.forward import may_quant_input
    from humming.kernel.humming import HummingKernel
    from humming.layer import HummingLayer
    from humming.schema import HummingWeightSchema
    from humming.tune import get_heuristics_config

    experts, n, k = w.shape
    made = []
    for name, bits, group, activation in HUMMING:
        weight = {"dtype": f"uint{bits}", "group_size": group}
        inputs = {"dtype": activation} if activation else None
        layer = HummingLayer(n, k, weight, inputs, num_experts=experts, torch_dtype=torch.bfloat16)
        layer = layer.to(w.device)
        schema = layer.weight_schema
        tensors = HummingWeightSchema.quant_tensor(w.bfloat16(), schema, torch.bfloat16)
        decoded = schema.dequant_tensors(tensors).float()
        layer.load_from_tensors(tensors)
        layer.transform()
        made.append((name, activation, layer, decoded))
    configs = {
        (name, way, m): get_heuristics_config(
            layer.humming_config, shape_m=m * top, gemm_type=way, device=w.device
        )
        for name, _, layer, _ in made
        for way in GROUPED
        for m in tokens
    }

    def compiled(key: tuple[str, str, int]) -> None:
        layer = next(layer for name, _, layer, _ in made if name == key[0])
        how = json.dumps({"gemm_type": key[1]})
        HummingKernel.prepare_kernels(
            layer.humming_config.to_str(), how, json.dumps(configs[key]), w.device
        )

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(compiled, configs))

    for name, activation, layer, decoded in made:
        for way in GROUPED:

            def run(x: Tensor, routing: Routing, layer=layer, name=name, way=way) -> Run:
                config = configs[name, way, len(x)]
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

            def seen(x: Tensor, layer=layer) -> Tensor:
                rows, scale = may_quant_input(layer.humming_config, x)
                return rows.float() if scale is None else rows.float() * scale.float().view(-1, 1)

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
        "expert_ids": torch.tensor(owners, dtype=torch.int32, device=DEVICE),
        "num_tokens_padded": torch.tensor(len(sorted_ids), dtype=torch.int32, device=DEVICE),
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


def reference(experts: Experts, x: Tensor, routing: Routing) -> Tensor:
    """One product for each expert, fp32."""
    rows, starts = routing.sort(experts.seen(x)), routing.starts.tolist()
    parts = zip(starts[:-1], starts[1:], experts.decoded, strict=True)
    return torch.cat([rows[a:b] @ w.T for a, b, w in parts])


def measure(
    experts: Experts, x: Tensor, routing: Routing, label: bench.Row, floor: ReadFloor
) -> bench.Row:
    label = replace(label, peer=experts.peer, format=experts.format, activation=experts.activation)
    limit = bench.TOLERANCE[x.dtype]
    limit += bench.TOLERANCE_QUANTIZED.get(experts.activation.removesuffix("-given"), 0.0)
    try:
        run, want = experts.run(x, routing), reference(experts, x, routing)

        def check(weight: Any) -> None:
            y = run(weight).view(want.shape)
            bench.check(y[routing.rows] if experts.by_token else y, want, limit)

        copies = rotated(experts.weight, experts.nbytes)
        check(copies[-1])
        us = median_us([lambda c=c: run(c) for c in copies], DEVICE)
        check(copies[-1])
    except Exception as error:  # what other packages raise is a note, not an end
        return replace(label, note=f"{experts.note} {bench.failure(error)}".strip())
    row = bench.finish(replace(label, us=us, note=experts.note), experts.nbytes, floor)
    return replace(row, tflops=row.tflops * routing.chosen.shape[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("h200_experts.csv"))
    parser.add_argument("--shape", default="14336x4096", metavar="NxK", help="of an expert")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top", type=int, default=2, help="experts of a token")
    parser.add_argument("--m", type=bench.parse_counts, default=[32, 64, 128, 256])
    parser.add_argument("--schemes", nargs="*", default=SCHEMES)
    parser.add_argument(
        "--sweep", action="store_true", help="time anybit's tiles, and nothing else"
    )
    parser.add_argument("--commit")
    args = parser.parse_args()
    n, k = bench.parse_shape(args.shape)
    torch.manual_seed(0)
    w = torch.randn(args.experts, n, k, device=DEVICE) * 0.02
    floor = ReadFloor.measure(DEVICE)
    blank = replace(bench.blank(DEVICE, args.commit), N=n, K=k)
    problems = []
    for m in args.m:
        scores = torch.rand(m, args.experts, device=DEVICE)
        problems.append(
            (
                torch.randn(m, k, device=DEVICE).bfloat16(),
                Routing(scores.topk(args.top).indices, args.experts),
            )
        )
    rows: list[bench.Row] = []
    every = [
        lambda: dense(w),
        lambda: anybit(w, args.schemes, args.sweep),
        lambda: humming(w, args.m, args.top),
    ]
    for contestants in every[1:2] if args.sweep else every:
        try:
            for experts in contestants():
                for x, routing in problems:
                    rows.append(measure(experts, x, routing, replace(blank, M=len(x)), floor))
                    print(bench.line(rows[-1]), flush=True)
                bench.write_csv(args.out, rows)
        except Exception as error:  # a package that is not there
            print(f"left out: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
