"""How long trellis codes take to quantize on a GPU: the encoder alone, and decoder blocks whole.

    python benchmarks/trellis_time.py --out benchmarks/results/h200_trellis_time.csv
    python benchmarks/trellis_time.py --blocks llama-3-8b llama-3-70b --specs trellis:rotate=kn

The encoder codes Gaussian numbers, and its error is printed beside its rate: a wrong one shows. A
block has the shapes of the model's and random weights. It is calibrated by GPTQ on random tokens,
everything included: inputs of its layers, Hessians, rotation, rounding, and running it again
quantized. The last of --layers blocks counts, since the first one compiles kernels, and a line
says what took its time. A model's time is that of its blocks. Its memory is the most that tensors
took at once, with --layers blocks, dense ones among them.
"""

import argparse
import datetime
import sys
import time
from pathlib import Path
from typing import Any

from csv_rows import write_rows

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import anybit
from anybit import GPTQ, Calibration
from anybit.formats import trellis
from anybit.formats.trellis import Trellis, table
from anybit.formats.trellis_encoder import paths
from anybit.quantizers import gptq
from anybit.quantizers.calibration import driver, statistics
from anybit.quantizers.calibration.block_runner import BlockRunner

SHAPES: dict[str, dict[str, int]] = {  # the blocks of a model, and their sizes
    "llama-3-8b": {
        "blocks": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "llama-3-70b": {
        "blocks": 80,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "tiny": {
        "blocks": 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
}
SPECS = ("trellis", "trellis:bits=3", "trellis:bits=4", "trellis:code=pair8", "trellis:code=mcg")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def wait() -> float:
    """The time at which the device has done what it was given."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def encoder(spec: str, tiles: int) -> dict[str, Any]:
    """Rate and error of the encoder; compiled and run once before."""
    fmt = anybit.get_format(spec)
    assert isinstance(fmt, Trellis)
    values = table(fmt.code, torch.device(DEVICE))
    random = torch.Generator(DEVICE).manual_seed(0)
    w = torch.randn(tiles, 256, generator=random, device=DEVICE)
    scale = fmt.fit(w)["scale"].float()
    x = (w / scale).view(tiles, -1, fmt.width)
    paths(x[:1], values, fmt)
    start = wait()
    states = paths(x, values, fmt)
    seconds = wait() - start
    old = (1 << fmt.window - fmt.bits) - 1
    if not torch.equal(states >> fmt.bits, states.roll(1, 1) & old):
        raise SystemExit(f"{spec}: the paths that were found are not closed")
    error = (values[states.long()].view_as(w) * scale - w).square().mean()
    return row("encoder", spec, w.numel(), seconds, f"mse {float(error):.5f}")


class Clock:
    """Adds up what functions take, in a context; those that others call count in both.

    Attributes:
        blocks: Seconds of each function, by block.
    """

    PARTS: tuple[tuple[str, Any, str], ...] = (
        ("inputs", BlockRunner, "collect"),
        ("of them Hessians", statistics, "products"),
        ("factors", gptq, "inverse_factor"),
        ("rounding", gptq, "propagate"),
        ("of it paths", trellis, "paths"),
        ("scales", gptq, "fitted_scale"),
        ("outputs", BlockRunner, "advance"),
    )

    def __enter__(self) -> "Clock":
        self.blocks: list[dict[str, float]] = []
        self.before = [(owner, name, getattr(owner, name)) for _, owner, name in self.PARTS]
        self.before.append((driver, "quantize_block", driver.quantize_block))
        for part, owner, name in self.PARTS:
            setattr(owner, name, self.timed(part, getattr(owner, name)))
        real = driver.quantize_block

        def begin(*args: Any, **kwargs: Any) -> Any:
            self.blocks.append({"start": wait()})
            return real(*args, **kwargs)

        driver.quantize_block = begin
        return self

    def timed(self, part: str, real: Any) -> Any:
        def measured(*args: Any, **kwargs: Any) -> Any:
            start = wait()
            out = real(*args, **kwargs)
            now = self.blocks[-1]
            now[part] = now.get(part, 0.0) + wait() - start
            return out

        return measured

    def __exit__(self, *error: object) -> None:
        for owner, name, real in self.before:
            setattr(owner, name, real)


def block(model: str, spec: str, windows: int, length: int, layers: int) -> dict[str, Any]:
    """Seconds that the last of a few blocks takes, and how many the model has of them."""
    shape = dict(SHAPES[model])
    blocks = shape.pop("blocks")
    config = LlamaConfig(num_hidden_layers=layers, vocab_size=256, dtype=torch.bfloat16, **shape)
    with torch.device(DEVICE):
        dense = LlamaForCausalLM(config).to(torch.bfloat16)
    ids = torch.randint(256, (windows, length), generator=torch.Generator().manual_seed(0))
    weights = sum(p.numel() for p in dense.model.layers[-1].parameters())
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with Clock() as clock:
        anybit.quantize_(dense, spec, GPTQ(Calibration(ids)), show_progress=False)
        seconds = wait() - clock.blocks[-1].pop("start")
    print(", ".join(f"{part} {time:.2f} s" for part, time in clock.blocks[-1].items()), flush=True)
    note = f"model {blocks * seconds / 60:.1f} min"
    if DEVICE == "cuda":
        note += f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
    return row(f"block of {model}", spec, weights, seconds, note)


def row(what: str, spec: str, weights: int, seconds: float, note: str) -> dict[str, Any]:
    return {
        "what": what,
        "format": spec,
        "weights": weights,
        "seconds": round(seconds, 3),
        "weights_per_s": round(weights / seconds),
        "note": note,
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU",
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).date(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiles", type=int, default=1 << 13, help="that are encoded (8192)")
    parser.add_argument("--specs", nargs="*", default=SPECS, help="formats of the encoder")
    parser.add_argument("--blocks", nargs="*", choices=SHAPES, default=["llama-3-8b"])
    parser.add_argument(
        "--block-specs", nargs="*", default=["trellis:rotate=kn"], help="formats of the blocks"
    )
    parser.add_argument(
        "--layers", type=int, default=2, help="blocks, of which the last counts (2)"
    )
    parser.add_argument("--windows", type=int, default=128, help="to calibrate with (128)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a window (2048)")
    parser.add_argument("--out", type=Path, help="the .csv file to write")
    args = parser.parse_args()
    rows = []
    todo: list[Any] = [(encoder, (spec, args.tiles)) for spec in args.specs]
    for model in args.blocks:
        todo += [
            (block, (model, spec, args.windows, args.length, args.layers))
            for spec in args.block_specs
        ]
    for measure, given in todo:
        rows.append(measure(*given))
        print(*rows[-1].values(), flush=True)
        if args.out:
            write_rows(args.out, rows)


if __name__ == "__main__":
    main()
