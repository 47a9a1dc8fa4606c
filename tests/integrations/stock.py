"""vLLM alone: what it makes of checkpoints, one after another.

    python tests/integrations/stock.py CASES RESULTS      # a process of its own

CASES: JSON, {name: {"path", "dtype", "what"}}. RESULTS: {name: ...}. What is asked:

tokens: 12 greedy ones after `PROMPT`. Its build for CPUs without AVX-512 lacks the product of 4-bit
    integers, for which plain torch stands in, with the weight as vLLM's kernel has repacked it.
weights: {"refusal": what it says, since it has no kernel for them on a CPU, "weights": a file with
    those that its layers hold, merged as they are there}. They are decoded by vLLM's own functions,
    or for integers by the layout, where a kernel would take them over.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
import vllm
from safetensors.torch import save_file
from vllm.config import set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.quantization.compressed_tensors import schemes
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import dequant_mxfp8_to_bf16
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import break_fp4_bytes
from vllm.model_executor.model_loader import get_model

PROMPT = [*range(50, 62)]
# Where vLLM chooses a kernel: the module of the scheme, and its function.
CHOICES = {
    "compressed_tensors_wNa16": "choose_mp_linear_kernel",
    "compressed_tensors_wNa8": "choose_mp_linear_kernel",
    "compressed_tensors_w8a16_fp8": "init_wfp8_a16_linear_kernel",
    "compressed_tensors_w4a4_nvfp4": "init_nvfp4_linear_kernel",
    "compressed_tensors_w4a4_mxfp4": "init_mxfp4_linear_kernel",
    "compressed_tensors_w8a8_mxfp8": "init_mxfp8_linear_kernel",
}


def tokens(path: str, dtype: str) -> list[int]:
    options: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 2, "skip_tokenizer_init": True}
    llm = vllm.LLM(path, enforce_eager=True, dtype=dtype, **options)
    sampling = vllm.SamplingParams(temperature=0, max_tokens=12, min_tokens=12, detokenize=False)
    (out,) = llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)
    return [*out.outputs[0].token_ids]


def codes(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Codes of `bits` bits (rows, count), which lie in int32 words one after another."""
    flat = ((words[:, :, None] >> torch.arange(32)) & 1).flatten(1)
    each = flat[:, : count * bits].unflatten(1, (count, bits))
    return (each << torch.arange(bits)).sum(-1)


class Plain:
    """Stands for a kernel: keeps the weight (N, K) in fp32."""

    def __init__(self, *given: Any, **_: Any):
        self.config = given[0] if given else None

    def input_quant_key(self) -> None:
        """It quantizes no activations."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.plain = self.weight(layer).float()

    def weight(self, layer: Any) -> torch.Tensor:
        scale = layer.weight_scale.data
        if self.config is not None:  # integers
            kind, k = self.config.weight_type, layer.input_size_per_partition
            q, n = codes(layer.weight_packed.data, kind.size_bits, k), len(scale)
            zero = torch.tensor(kind.bias)
            if self.config.zero_points:
                packed = layer.weight_zero_point.data.T
                zero = codes(packed, kind.size_bits, n).T.repeat_interleave(k // scale.shape[1], 1)
            return (q - zero) * scale.float().repeat_interleave(k // scale.shape[1], 1)
        weight = layer.weight.data
        if scale.dtype == torch.uint8 and weight.dtype != torch.uint8:
            return dequant_mxfp8_to_bf16(weight, scale)
        if weight.dtype != torch.uint8:
            return weight.T.float() * scale.float()
        elements = break_fp4_bytes(weight, torch.float32)
        if scale.dtype == torch.uint8:
            return elements * torch.exp2(scale.float() - 127).repeat_interleave(32, 1)
        return elements * (scale.float() * layer.weight_global_scale).repeat_interleave(16, 1)


def layers(path: str, dtype: str, file: Path) -> dict[str, torch.Tensor]:
    """What vLLM's model holds, by its names of layers."""
    config = EngineArgs(path, dtype=dtype, max_model_len=64, skip_tokenizer_init=True)
    made = config.create_engine_config()
    with set_current_vllm_config(made):
        init_distributed_environment(1, 0, f"file://{file}.ranks", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        model = get_model(vllm_config=made)
    return {name: m.plain for name, m in model.named_modules() if hasattr(m, "plain")}


def weights(path: str, dtype: str, file: Path) -> dict[str, str]:
    try:
        layers(path, dtype, file)
        refusal = ""
    except (ValueError, NotImplementedError) as error:
        refusal = str(error)
    clean(file)
    kept = {name: getattr(module, CHOICES[name]) for name, module in modules()}
    for name, module in modules():
        kind = "wNa" in name  # of which they choose the class
        setattr(module, CHOICES[name], lambda *_, kind=kind, **__: Plain if kind else Plain())
    try:
        save_file(layers(path, dtype, file), file)
    finally:
        for name, module in modules():
            setattr(module, CHOICES[name], kept[name])
    return {"refusal": refusal, "weights": str(file)}


def modules() -> list[tuple[str, Any]]:
    return [(name, sys.modules[f"{schemes.__name__}.{name}"]) for name in CHOICES]


def clean(file: Path) -> None:
    gc.collect()
    cleanup_dist_env_and_memory()
    Path(f"{file}.ranks").unlink(missing_ok=True)


def product(x, packed, out, scales, zeros, bias, *_):
    """x (M, K) by a weight that vLLM's CPU kernel has packed: 16 rows beside each other."""
    (groups, n), k = scales.shape, x.shape[1]
    q = codes(packed.view(-1, 2), 4, 16).view(n // 16, k, 16).permute(0, 2, 1).reshape(n, k)
    zero = torch.full((groups, n), 8) if zeros is None else codes(zeros, 4, n)
    each = [t.T.repeat_interleave(k // groups, 1) for t in (zero, scales.float())]
    y = torch.nn.functional.linear(x.float(), (q - each[0]) * each[1])
    out.copy_(y if bias is None else y + bias)


def main(cases: str, results: str) -> None:
    library = None
    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        library = torch.library.Library("_C", "FRAGMENT")
        library.define(
            "cpu_gemm_wna16(Tensor x, Tensor q, Tensor(a2!) out, Tensor scales, Tensor? zeros, "
            "Tensor? bias, SymInt pack_factor, str isa) -> ()"
        )
        library.impl("cpu_gemm_wna16", product, "CPU")
    out = {}
    for number, (name, case) in enumerate(json.loads(Path(cases).read_text()).items()):
        file = Path(results).with_suffix(f".{number}")
        if case["what"] == "tokens":
            out[name] = tokens(case["path"], case["dtype"])
        else:
            out[name] = weights(case["path"], case["dtype"], file)
        clean(file)
    Path(results).write_text(json.dumps(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
