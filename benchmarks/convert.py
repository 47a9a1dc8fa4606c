"""Time and memory of `anybit convert`, for random weights in the layouts of other tools.

    python benchmarks/convert.py --layers 2 --place build/models

Each checkpoint is a Llama with the shapes of Llama-3-8B and few layers. It is converted in a
process of its own, whose largest memory is printed beside 1 GiB + 6 times the largest tensor.
Imports do not count in its time.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, WIDE, HEADS, KV = 4096, 14336, 32, 8
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN * KV // HEADS, HIDDEN),
    "self_attn.v_proj": (HIDDEN * KV // HEADS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (WIDE, HIDDEN),
    "mlp.up_proj": (WIDE, HIDDEN),
    "mlp.down_proj": (HIDDEN, WIDE),
}
CONVERT = """
import sys, time
from pathlib import Path
from anybit.checkpoint.foreign.convert import convert_checkpoint
start = time.perf_counter(), time.process_time()
convert_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]))
print(time.perf_counter() - start[0], time.process_time() - start[1])
"""


def bits(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Random ones."""
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    return torch.randint(low, high, shape, dtype=dtype)


def e4m3(*shape: int) -> Tensor:
    """Random numbers that are finite, and positive as scales are."""
    return torch.randint(1, 127, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)


def gptq(n: int, k: int) -> dict[str, Tensor]:
    return {
        "qweight": bits(k // 8, n, dtype=torch.int32),
        "qzeros": bits(k // 128, n // 8, dtype=torch.int32),
        "scales": torch.rand(k // 128, n).half() + 0.1,
    }


def awq(n: int, k: int) -> dict[str, Tensor]:
    return {
        "qweight": bits(k, n // 8, dtype=torch.int32),
        "qzeros": bits(k // 128, n // 8, dtype=torch.int32),
        "scales": torch.rand(k // 128, n).half() + 0.1,
    }


def mxfp4(n: int, k: int) -> dict[str, Tensor]:
    scale = torch.randint(110, 130, (n, k // 32), dtype=torch.uint8)
    return {"weight": bits(n, k // 2), "weight_scale": scale}


def nvfp4(n: int, k: int) -> dict[str, Tensor]:
    number = torch.tensor(0.01)
    return {"weight": bits(n, k // 2), "weight_scale": e4m3(n, k // 16), "weight_scale_2": number}


def fp8(n: int, k: int) -> dict[str, Tensor]:
    return {"weight": e4m3(n, k), "weight_scale_inv": torch.rand(n // 128, k // 128) + 0.1}


KINDS: dict[str, tuple[Callable[[int, int], dict[str, Tensor]], dict[str, Any]]] = {
    "gptq int4": (gptq, {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}),
    "awq int4": (awq, {"quant_method": "awq", "bits": 4}),
    "modelopt mxfp4": (mxfp4, {"quant_method": "modelopt", "quant_algo": "MXFP4"}),
    "modelopt nvfp4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "fp8 blocks": (fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
}


def write(kind: str, layers: int, place: Path) -> int:
    """A checkpoint; returns the bytes of its largest tensor."""
    from transformers import LlamaConfig

    make, quantization = KINDS[kind]
    norm, small = torch.ones(HIDDEN).bfloat16(), torch.randn(512, HIDDEN).bfloat16()
    tensors = {"model.embed_tokens.weight": small, "lm_head.weight": small.clone()}
    tensors["model.norm.weight"] = norm.clone()
    for i in range(layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{name}.weight"] = norm.clone()
        for name, shape in SHAPES.items():
            made = make(*shape)
            tensors |= {f"model.layers.{i}.{name}.{key}": t for key, t in made.items()}
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=WIDE,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV,
        vocab_size=512,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    ).to_dict()
    (place / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    return max(t.nbytes for t in tensors.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--place", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    for kind in args.kinds:
        source = Path(tempfile.mkdtemp(dir=args.place))
        try:
            largest = write(kind, args.layers, source)
            size = (source / "model.safetensors").stat().st_size
            command = [sys.executable, "-c", CONVERT, str(source), str(source / "out")]
            child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert child.stdout is not None
            said = child.stdout.read().split()
            _, status, usage = os.wait4(child.pid, 0)
        finally:
            shutil.rmtree(source)
        if status:
            raise SystemExit(f"{kind}: the conversion failed")
        unit = 1 if sys.platform == "darwin" else 1024
        peak, aim = usage.ru_maxrss * unit / 2**30, 1 + 6 * largest / 2**30
        seconds, busy = map(float, said[-2:])
        print(
            f"{kind}: {size / 1e9:.2f} GB in {seconds:.1f} s, of which {busy:.1f} s of processors, "
            f"{size / 1e9 / busy:.2f} GB in each; at most {peak:.2f} GiB of memory, "
            f"1 GiB + 6 of the largest tensor {aim:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
