"""Time the products of a mixture of experts in one run: anybit, humming and torch.

    python benchmarks/experts.py --out benchmarks/results/h200_experts.csv
    python benchmarks/experts.py --models --peers anybit --out h200_models.csv

The second one takes the experts of four models, both projections, from 1 to 4096 tokens, and prints
beside each time what `hopper/expert_tiles.py` expects. `--micro` takes the formats in which such
models are published, `--formats` some of humming's. `--sweep` times every tile instead;
`--around` what happens to tokens around the two products, beside torch's operators that define it.

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
from unittest import mock

import torch
from peers import FP8_BLOCKS, HUMMINGS_NAMES, MXFP4, NVFP4
from torch import Tensor

from anybit import quantize_tensor
from anybit.core.scheme import parse_scheme
from anybit.errors import InvalidInput
from anybit.kernels.cute import operands
from anybit.kernels.cute.decode import Decoder
from anybit.kernels.hopper import scalar_linear
from anybit.kernels.hopper.expert_tiles import choose_grouped, cycles, family_grouped
from anybit.kernels.hopper.tile import Tile
from anybit.kernels.reference import quantize_tokens
from anybit.measure import bench
from anybit.measure.timing import ReadFloor, median_us, medians_in_turns, rotated
from anybit.nn import routing

DEVICE = torch.device("cuda")
SCHEMES = ["liquid@int8", "int8@int8", "int4:group=128", "fp6"]
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
PEERS = ("torch", "anybit", "humming")
MODEL_SCHEMES = ["liquid@int8", "int4:group=64", "fp6"]
MICRO = ["mxfp4", "mxfp4@fp8", "nvfp4", "fp8:group=128@fp8"]
MODEL_TOKENS = [1, 4, 16, 64, 256, 1024, 4096]


@dataclass
class Problem:
    """Experts (n, k), of which each token meets `top`."""

    experts: int
    top: int
    n: int
    k: int


MODELS = {  # gate and up together, and down
    "Mixtral-8x7B": (Problem(8, 2, 28672, 4096), Problem(8, 2, 4096, 14336)),
    "Qwen3-30B-A3B": (Problem(128, 8, 1536, 2048), Problem(128, 8, 2048, 768)),
    "DeepSeek-V3": (Problem(256, 8, 4096, 7168), Problem(256, 8, 7168, 2048)),
    "GPT-OSS-20B": (Problem(32, 4, 5760, 2880), Problem(32, 4, 2880, 2880)),
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
    expected: rows -> microseconds that the rule for tiles expects.
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
    expected: Callable[[int], float] | None = None


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


def anybit(w: Tensor, experts: int, schemes: list[str], sweep: bool) -> Iterator[Experts]:
    """anybit's Hopper kernels, as a layer of the engine launches them; or with every tile."""
    dtype, (_, n, k) = torch.bfloat16, w.shape
    for scheme in schemes:
        fmt, activation = parse_scheme(scheme)
        try:
            made = [quantize_tensor(expert, fmt) for expert in w]
        except InvalidInput as error:
            print(f"left out: {scheme}: {error}", flush=True)
            continue
        prepared = scalar_linear.prepare_experts(made, activation, dtype)
        index = torch.tensor(owners(w, experts), device=w.device)
        prepared = prepared._replace(
            layout=tuple(of_all(t, index, len(w)) for t in prepared.layout)
        )
        decoded = torch.stack([p.dequantize() for p in made])
        operand = getattr(torch, operands.operand_of(activation, dtype))
        d = operands.decoder_for(fmt, operand)

        def expected(m: int, tile: Tile | None, d: Decoder = d) -> float:
            tile = tile or choose_grouped(d, m, n, k, experts)
            return cycles(tile, d, m, n, k, experts) / 1755  # at 1.755 GHz

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
            plans = [*product(family_grouped(d), (False, True))]
        for tile, overlap in plans:
            yield Experts(
                "anybit-hopper",
                fmt.spec,
                given(activation),
                prepared,
                experts * made[0].nbytes(),
                decoded,
                partial(launch, tile=tile, overlap=overlap),
                seen_as(activation),
                f"{'pdl' if overlap else 'plain'} sweep: {tile.name}" if tile else "",
                expected=partial(expected, tile=tile),
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
    weights = (experts.decoded[i] for i in owners(experts.decoded, routing.experts))
    parts = zip(starts[:-1], starts[1:], weights, strict=True)
    return torch.cat([rows[a:b] @ w.T for a, b, w in parts])


def measure(
    contestants: list[Experts], x: Tensor, routing: Routing, blank: bench.Row, floor: ReadFloor
) -> list[bench.Row]:
    """Check every contestant, then time all in turns, on a chip that is as warm for each."""
    rows, ready = [], []
    copies: dict[int, list[Any]] = {}  # of weights, which several contestants may share
    for experts in contestants:
        row = replace(
            blank, peer=experts.peer, format=experts.format, activation=experts.activation
        )
        try:
            run, check = experts.run(x, routing), checked(experts, x, routing)
            if id(experts.weight) not in copies:
                copies[id(experts.weight)] = rotated(experts.weight, experts.nbytes)
            weights = copies[id(experts.weight)]
            check(run(weights[-1]))
            ready.append((row, experts, [partial(run, w) for w in weights], check))
        except Exception as error:  # what other packages raise is a note, not an end
            rows.append(replace(row, note=f"{experts.note} {bench.failure(error)}".strip()))
    times = medians_in_turns([calls for _, _, calls, _ in ready], DEVICE)
    # Of the weights, those of experts that no token meets are not read.
    busy = int((routing.starts.diff() > 0).sum()) / routing.experts
    for (row, experts, calls, check), us in zip(ready, times, strict=True):
        note = experts.note
        if experts.expected is not None:
            note = f"{note} expected {experts.expected(routing.chosen.numel()):.1f}".strip()
        try:
            if isinstance(us, Exception):
                raise us
            check(calls[-1]())
        except Exception as error:
            rows.append(replace(row, note=f"{note} {bench.failure(error)}".strip()))
            continue
        row = bench.finish(replace(row, us=us, note=note), round(experts.nbytes * busy), floor)
        rows.append(replace(row, tflops=row.tflops * routing.chosen.shape[1]))
    return rows


def checked(experts: Experts, x: Tensor, routing: Routing) -> Callable[[Tensor], None]:
    """Whether outputs are right; WrongResult if not."""
    extra = bench.TOLERANCE_QUANTIZED.get(experts.activation.removesuffix("-given"), 0.0)
    limit, want = bench.TOLERANCE[x.dtype] + extra, reference(experts, x, routing)

    def check(y: Tensor) -> None:
        y = y.view(want.shape)
        bench.check(y[routing.rows] if experts.by_token else y, want, limit)

    return check


def run(problem: Problem, args: argparse.Namespace, floor: ReadFloor) -> Iterator[bench.Row]:
    """Rows of one problem, for every contestant and number of tokens."""
    experts, top, n, k = problem.experts, problem.top, problem.n, problem.k
    w = torch.randn(min(experts, DIFFERENT), n, k, device=DEVICE) * 0.02
    inputs = []
    for m in args.m:
        choices = torch.rand(m, experts, device=DEVICE).topk(top).indices
        inputs.append((torch.randn(m, k, device=DEVICE).bfloat16(), Routing(choices, experts)))
    every = {
        "torch": lambda: dense(w, experts),
        "anybit": lambda: anybit(w, experts, args.schemes, args.sweep),
        "humming": lambda: humming(w, experts, args.m, top, args.formats),
    }
    blank = replace(bench.blank(DEVICE, args.commit), N=n, K=k)
    contestants: list[Experts] = []
    for peer in ["anybit"] if args.sweep else args.peers:
        try:
            contestants += every[peer]()
        except Exception as error:  # a package that is not there
            print(f"left out: {peer}: {type(error).__name__}: {error}", flush=True)
    for x, chosen in inputs:
        yield from measure(contestants, x, chosen, replace(blank, M=len(x)), floor)


def around(problem: Problem, m: int) -> tuple[float, float]:
    """Microseconds of choosing, sorting, spreading as int8 and combining: by kernels, by torch.

    Torch's operators spread tokens without quantizing them.
    """
    experts, top, k = problem.experts, problem.top, problem.k
    logits = torch.randn(m, experts, device=DEVICE)  # fp32: no two are equal
    x = torch.randn(m, k, device=DEVICE).bfloat16()
    y = torch.randn(m * top, k, device=DEVICE).bfloat16()

    def run(kind: str | None) -> Tensor:
        weight, chosen = routing.choose(logits, top, True)
        where = routing.sort(chosen, experts)
        routing.spread(x, where, kind)
        return routing.combine(y, where, weight)

    times, outputs = [], []
    for find, kind in ((routing.kernels, "int8"), (lambda *tensors: None, None)):
        with mock.patch.object(routing, "kernels", find), torch.no_grad():
            outputs.append(run(kind).float())
            times.append(median_us([lambda kind=kind: run(kind)], DEVICE))
    error = (outputs[0] - outputs[1]).norm() / outputs[1].norm()
    if float(error) > 0.01:
        print(f"WRONG: an error of {float(error):.3f}, {problem}, {m} tokens", flush=True)
    return times[0], times[1]


def all_around(args: argparse.Namespace) -> Iterator[bench.Row]:
    """Rows of every model; N: its experts, K: its hidden size."""
    for name, (problem, _) in MODELS.items():
        blank = replace(bench.blank(DEVICE, args.commit), N=problem.experts, K=problem.k)
        for m in args.m:
            ours, torchs = around(problem, m)
            print(f"{name} {m} tokens: {ours:.1f} us, torch {torchs:.1f} us", flush=True)
            for peer, us in (("anybit", ours), ("torch", torchs)):
                yield replace(blank, peer=peer, format="routing", M=m, us=us, note=name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("h200_experts.csv"))
    parser.add_argument("--shape", default="14336x4096", metavar="NxK", help="of an expert")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top", type=int, default=2, help="experts of a token")
    parser.add_argument("--m", type=bench.parse_counts)
    parser.add_argument("--schemes", nargs="*")
    parser.add_argument("--models", nargs="*", choices=MODELS, help="instead of a shape; all")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=PEERS)
    parser.add_argument("--formats", nargs="*", help="of humming's")
    parser.add_argument("--micro", action="store_true", help="MXFP4, NVFP4 and FP8 blocks")
    parser.add_argument(
        "--sweep", action="store_true", help="time anybit's tiles, and nothing else"
    )
    parser.add_argument("--around", action="store_true", help="time what is around the products")
    parser.add_argument("--commit")
    args = parser.parse_args()
    problems = [Problem(args.experts, args.top, *bench.parse_shape(args.shape))]
    if args.models is not None:
        problems = [p for name in args.models or MODELS for p in MODELS[name]]
    many = args.models is not None or args.around
    args.m = args.m or (MODEL_TOKENS if many else [32, 64, 128, 256])
    usual = SCHEMES if args.models is None else MODEL_SCHEMES
    args.schemes = args.schemes or (MICRO if args.micro else usual)
    micro = [s.partition("@")[0] for s in MICRO]
    args.formats = args.formats or (micro if args.micro else ["int4:group=64", "fp6"])
    torch.manual_seed(0)
    if args.around:
        bench.write_csv(args.out, all_around(args))
        return
    floor = ReadFloor.measure(DEVICE)
    rows: list[bench.Row] = []
    for problem in problems:
        for row in run(problem, args, floor):
            rows.append(row)
            print(bench.line(row), flush=True)
            bench.write_csv(args.out, rows)


if __name__ == "__main__":
    main()
