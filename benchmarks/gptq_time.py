"""Seconds that GPTQ takes for one 4096x4096 layer, clip search and factorization included."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import anybit
from anybit.quantizers.gptq import inverse_factor
from anybit.quantizers.replay import Seen


def main(device: str, specs: list[str]) -> None:
    random = torch.Generator(device).manual_seed(0)
    k = 4096
    w = torch.randn(k, k, generator=random, device=device) * 0.02
    x = torch.randn(2 * k, k, generator=random, device=device)
    x = x @ torch.randn(k, k, generator=random, device=device)
    seen = Seen()
    seen.add(x, ("hessian",), every=len(x))
    inverse_factor(seen.hessian, 0.01)  # loads the device's libraries
    for spec in specs:
        fmt = anybit.get_format(spec)
        for quantizer in (anybit.GPTQ(), anybit.GPTQ(clip=False)):
            start = time.perf_counter()
            packed = quantizer.quantize(w, fmt, seen)
            packed.planes[0].flatten()[0].item()
            print(device, torch.get_num_threads(), "threads", spec, quantizer, end=" ")
            print(f"{time.perf_counter() - start:.2f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
