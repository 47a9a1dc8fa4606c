"""What a converted checkpoint must be, whichever tool it came from."""

import json
from pathlib import Path

import torch

import anybit
from anybit.checkpoint.foreign.convert import Converted, convert_checkpoint, read_layers
from anybit.core.packed import Packed
from anybit.files.directory import read_json
from anybit.files.safetensors import stored_tensors
from anybit.nn.model import quantized_modules
from tests.foreign.make import digest


def converted(source: Path, out: Path) -> Converted:
    """Convert, and fail unless every weight is what the tool itself decodes, bit for bit."""
    wanted = json.loads((source / "expected.json").read_text())["sha256"]
    report = convert_checkpoint(source, out)
    assert set(report.formats) | set(report.decoded) == set(wanted)
    if report.formats:
        model = anybit.load(out)
        coded = dict(quantized_modules(model))
        found = {name: layer.dequantize() for name, layer in coded.items()}
        assert {n: layer.scheme for n, layer in coded.items()} == report.formats
        assert {n: digest(w) for n, w in found.items()} == {n: wanted[n] for n in report.formats}
    stored = stored_tensors(source)
    layers = read_layers(source, read_json(source / "config.json"), stored)
    dense = stored_tensors(out)
    for name in report.decoded:
        weight = layers[name].read()
        assert not isinstance(weight, Packed)
        assert digest(weight) == wanted[name]
        kept = dense[f"{name}.weight"].read()
        assert torch.equal(kept, weight.to(kept.dtype))
    own = {tensor for layer in layers.values() for tensor in layer.tensors}
    for name, tensor in stored.items():
        if name not in own and name not in report.dropped:
            assert torch.equal(tensor.read(), dense[name].read()), name
    return report
