"""Makes tests/foreign/fixtures/ with the tools themselves: `python make.py gptq`, in an environment
that has gptqmodel; likewise awq (gptqmodel), hqq, aqlm, compressed-tensors, bitsandbytes.

Every fixture is a checkpoint of a Llama of one block, and `expected.json`: of each quantized layer
the SHA-256 of the weights that the tool itself decodes in fp32 (see `digest`).
"""

import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

FIXTURES = Path(__file__).parent / "fixtures"
PICO = Path(__file__).parents[2] / "models" / "pico"


def llama(width: int = 32) -> Any:
    """About ten thousand random weights in fp16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).half().eval()
    for i, module in enumerate(linears(model).values()):  # columns of different sizes, and offset
        size = torch.rand(module.in_features, generator=torch.Generator().manual_seed(i)) + 0.5
        module.weight.data = module.weight.data * size.half() + 0.01
    return model


def linears(model: nn.Module) -> dict[str, Any]:
    named = model.named_modules()
    return {n: m for n, m in named if isinstance(m, nn.Linear) and n != "lm_head"}


def digest(weight: torch.Tensor) -> str:
    """SHA-256 of a weight (N, K) fp32, with -0 as 0."""
    return hashlib.sha256((weight.float() + 0.0).contiguous().numpy().tobytes()).hexdigest()


def keep(name: str, made: Path, expected: dict[str, torch.Tensor], **about: Any) -> None:
    """Move what the tool saved into the fixtures, with the digests of what it decodes."""
    out = FIXTURES / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    shutil.copy(made / "config.json", out)
    for file in made.glob("*.safetensors*"):
        shutil.copy(file, out)
    text = {"made_by": about, "sha256": {n: digest(w) for n, w in expected.items()}}
    (out / "expected.json").write_text(json.dumps(text, indent=1) + "\n")
    size = sum(f.stat().st_size for f in out.iterdir())
    print(f"{name}: {len(expected)} layers, {size} bytes")


def named(model: nn.Module, kind: Any) -> dict[str, Any]:
    return {n.removeprefix("model.model."): m for n, m in model.named_modules() if isinstance(m, kind)}


# Tools.


def gptq() -> None:
    import gptqmodel
    from gptqmodel import GPTQModel, QuantizeConfig
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    cases: dict[str, dict[str, Any]] = {
        "gptq_4bit_v1": {"bits": 4, "group_size": 16, "desc_act": False, "sym": True},
        "gptq_4bit_act_order": {"bits": 4, "group_size": 16, "desc_act": True, "sym": True},
        "gptq_3bit_v2": {"bits": 3, "group_size": 32, "desc_act": False, "sym": False},
        "gptq_2bit_v1": {"bits": 2, "group_size": 16, "desc_act": False, "sym": False},
        "gptq_8bit_row": {"bits": 8, "group_size": -1, "desc_act": True, "sym": True},
    }
    for name, options in cases.items():
        with tempfile.TemporaryDirectory() as place:
            dense, made = Path(place, "dense"), Path(place, "made")
            llama().save_pretrained(dense)
            for file in PICO.glob("tokenizer*"):  # it wants one, and never uses it
                shutil.copy(file, dense)
            layout = {"format": "gptq_v2"} if name.endswith("v2") else {}
            config = QuantizeConfig(**options, **layout, offload_to_disk=False)
            model = GPTQModel.load(str(dense), config, device="cpu", backend="torch")
            random = torch.Generator().manual_seed(0)
            rows = [torch.randint(3, 32, (64,), generator=random).tolist() for _ in range(16)]
            text = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows]
            model.quantize(text, batch_size=1, tokenizer=None)
            model.save(str(made))
            loaded = GPTQModel.load(str(made), device="cpu", backend="torch", dtype=torch.float16)
            expected = {}
            for layer, module in loaded.model.named_modules():
                if isinstance(module, TorchLinear):
                    module.scales = module.scales.float()
                    expected[layer] = module.dequantize_weight().T
            keep(name, made, expected, gptqmodel=gptqmodel.__version__, **options)


if __name__ == "__main__":
    for tool in sys.argv[1:]:
        globals()[tool.replace("-", "_")]()
