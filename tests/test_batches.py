"""Calibration on batches of a model's inputs: what layers see, computed another way."""

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    JambaConfig,
    JambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import anybit
from anybit import GPTQ, Calibration
from anybit.checkpoint.calibrated import calibrate_checkpoint
from anybit.errors import InvalidInput
from anybit.quantizers.calibration.block_runner import BlockRunner
from anybit.quantizers.calibration.blocks import block_lists
from anybit.quantizers.calibration.rehearsal import rehearse
from anybit.quantizers.calibration.statistics import Statistics
from tests import tiny
from tests.models import zoo

VOCAB, LENGTH = 96, 24
LENGTHS = (24, 15, 20, 9)  # of the sequences, of which the second and fourth have padding before
ONE = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": VOCAB, "num_attention_heads": 4}
TWO = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "vocab_size": VOCAB,
}  # fmt: skip


def bert() -> Any:
    return BertForMaskedLM(BertConfig(**ONE, num_hidden_layers=3))


def t5() -> Any:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": 4, "vocab_size": VOCAB}
    more = {"num_layers": 3, "decoder_start_token_id": 0, "initializer_factor": 2.0}
    return T5ForConditionalGeneration(T5Config(**sizes | more))


def whisper() -> Any:
    config = WhisperConfig(
        **TWO, num_mel_bins=8, max_source_positions=16, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config)


def mixtral() -> Any:
    sizes = ONE | {"num_hidden_layers": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(**sizes, initializer_range=0.1))


def jamba() -> Any:
    sizes = ONE | {"num_hidden_layers": 2, "num_key_value_heads": 2, "num_experts": 4}
    return JambaForCausalLM(
        JambaConfig(
            **sizes,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            mamba_d_state=8,
        )
    )


def made(kind: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return kind().eval()


def padded(decoder: bool = False, labels: bool = False) -> list[dict[str, Tensor]]:
    """Two batches of two sequences each, with padding."""
    random = torch.Generator().manual_seed(1)
    out = []
    for first in (0, 2):
        ids = torch.randint(5, VOCAB, (2, LENGTH), generator=random)
        mask = torch.ones_like(ids)
        mask[0, LENGTHS[first] :] = 0
        mask[1, : LENGTH - LENGTHS[first + 1]] = 0
        batch = {"input_ids": ids, "attention_mask": mask}
        if decoder or labels:
            # As long as the encoder's sequence, so that the masks are told apart by more than that.
            ids = torch.randint(5, VOCAB, (2, LENGTH), generator=random)
            keep = torch.arange(LENGTH) < torch.tensor([[18], [11]])
            batch |= {"decoder_input_ids": ids, "decoder_attention_mask": keep.long()}
        if labels:
            del batch["decoder_attention_mask"], batch["decoder_input_ids"]
            batch["labels"] = torch.where(keep, ids, -100)
        out.append(batch)
    return out


def sound() -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(1)
    return [
        {
            "input_features": torch.randn(2, 8, 32, generator=random),
            "decoder_input_ids": torch.randint(5, VOCAB, (2, 7), generator=random),
        }
        for _ in range(2)
    ]


def image(architecture: str) -> tuple[Any, list[dict[str, Tensor]]]:
    model = zoo.Model(architecture).make()
    inputs = zoo.inputs(model)
    assert "pixel_values" in inputs
    return model, [inputs, inputs | {"pixel_values": inputs["pixel_values"].flip(0)}]


def seen_by_hooks(
    model: nn.Module, names: list[str], batches: list[dict[str, Tensor]], mask: str | None
) -> dict[str, Tensor]:
    """The inputs (T, K) of layers in whole forward passes, at the positions of a mask."""
    rows: dict[str, list[Tensor]] = {name: [] for name in names}
    real: list[Tensor | None] = [None]

    def observe(module: nn.Module, args: tuple[Tensor, ...], name: str) -> None:
        x = args[0]
        rows[name].append(x.flatten(0, -2) if real[0] is None else x[real[0]])

    for name in names:
        model.get_submodule(name).register_forward_pre_hook(
            lambda module, args, name=name: observe(module, args, name)
        )
    with torch.no_grad():
        for batch in batches:
            real[0] = None if mask is None else batch[mask].bool()
            model(**batch)
    for name in names:
        model.get_submodule(name)._forward_pre_hooks.clear()
    return {name: torch.cat(found) for name, found in rows.items()}


def second_moment(x: Tensor) -> Statistics:
    return Statistics(len(x), hessian=x.float().T @ x.float() / len(x))


def linears(model: nn.Module, prefix: str) -> list[str]:
    return [
        n
        for n, m in model.named_modules()
        if n.startswith(prefix) and isinstance(m, nn.Linear) and min(m.weight.shape) >= 16
    ]


def check_against_hooks(
    model: Any, batches: list[dict[str, Tensor]], mask_of: Callable[[str], str | None], at: int = 0
) -> None:
    """Compare the statistics of a list of dense blocks with the inputs in the whole model."""
    names = linears(model, "")
    lists = block_lists(model, names)
    found = lists[at]
    runner = BlockRunner(model, found.modules, batches, found.encoder)
    with torch.no_grad():
        rehearse(runner, lambda index: nullcontext())
    for index, block in enumerate(found.modules):
        prefix = f"{found.name}.{index}."
        own = [name.removeprefix(prefix) for name in linears(model, prefix)]
        with torch.no_grad():
            seen = runner.collect(index, own, ("hessian",))
            runner.advance(index)
        assert own
        for name in own:
            (x,) = seen_by_hooks(model, [prefix + name], batches, mask_of(name)).values()
            want = second_moment(x)
            assert seen[name].tokens == want.tokens, name
            torch.testing.assert_close(seen[name].hessian, want.hessian, atol=1e-4, rtol=1e-3)
        assert block is model.get_submodule(prefix[:-1])


def test_encoder() -> None:
    check_against_hooks(made(bert), padded(), lambda name: "attention_mask")


def test_encoder_of_an_encoder_decoder() -> None:
    check_against_hooks(made(t5), padded(decoder=True), lambda name: "attention_mask")


def test_decoder_of_an_encoder_decoder() -> None:
    """Its blocks pass a position bias on, and read two sequences, each with its own padding."""

    def mask_of(name: str) -> str:
        reads_encoder = "EncDecAttention.k" in name or "EncDecAttention.v" in name
        return "attention_mask" if reads_encoder else "decoder_attention_mask"

    check_against_hooks(made(t5), padded(decoder=True), mask_of, at=1)


@pytest.mark.parametrize("at", [0, 1])
def test_sound(at: int) -> None:
    check_against_hooks(made(whisper), sound(), lambda name: None, at)


@pytest.mark.parametrize(
    "architecture",
    ["InternVLForConditionalGeneration", "Qwen3VLForConditionalGeneration"],
)
def test_images(architecture: str) -> None:
    """Qwen3-VL adds features of the image to hidden states between blocks."""
    model, batches = image(architecture)
    check_against_hooks(model, batches, lambda name: None)


def test_the_language_part_is_calibrated_even_where_it_is_the_smaller() -> None:
    model = zoo.Model("MllamaForConditionalGeneration").make()
    names = linears(model, "")
    (found,) = block_lists(model, names)
    assert found.name == "model.language_model.layers"
    assert sum(".vision_model." in name for name in names) > len(names) / 2
    runner = BlockRunner(model, found.modules, torch.arange(4, 36)[None])
    with torch.no_grad():
        rehearse(runner, lambda index: nullcontext())


def test_labels_say_where_a_decoder_has_padding() -> None:
    model, batches = made(t5), padded(labels=True)
    found = block_lists(model, linears(model, ""))[1]
    runner = BlockRunner(model, found.modules, batches, found.encoder)
    seen = runner.collect(0, ["layer.0.SelfAttention.q", "layer.1.EncDecAttention.k"], ("amax",))
    assert seen["layer.0.SelfAttention.q"].tokens == 2 * (18 + 11)
    assert seen["layer.1.EncDecAttention.k"].tokens == sum(LENGTHS)


@pytest.mark.parametrize("kind", [mixtral, jamba])
def test_experts_see_no_padding(kind: Callable[[], Any]) -> None:
    """Each expert sees what it does in a forward pass of each sequence without its padding."""

    def collected(batches: list[dict[str, Tensor]]) -> dict[str, Statistics]:
        model = made(kind)
        anybit.nn.experts.split(model)
        (found,) = block_lists(model, linears(model, ""))
        runner = BlockRunner(model, found.modules, batches)
        out = {}
        for index in range(2):
            prefix = f"{found.name}.{index}."
            own = [name.removeprefix(prefix) for name in linears(model, prefix)]
            seen = runner.collect(index, own, ("hessian", "amax"))
            out |= {prefix + name: statistics for name, statistics in seen.items()}
            runner.advance(index)
        return out

    batches = padded()
    alone = [
        {"input_ids": ids[mask.bool()][None]}
        for batch in batches
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    if kind is jamba:  # its states run over padding before a sequence, masked or not
        batches = [b for b in batches for b in ({k: v[:1] for k, v in b.items()},)]
        alone = alone[::2]
    with torch.no_grad():
        got, want = collected(batches), collected(alone)
    assert sum(".experts." in name and s.tokens > 0 for name, s in got.items()) > 6
    for name, statistics in want.items():
        assert got[name].tokens == statistics.tokens, name
        if statistics.tokens:
            torch.testing.assert_close(
                got[name].hessian, statistics.hessian, atol=2e-4, rtol=2e-3, msg=name
            )


def test_gptq_is_that_of_each_layer_alone() -> None:
    """The decoder's layers are rounded by what they see behind the quantized encoder."""
    spec, batches = "int4:group=16", padded(decoder=True) * 2
    whole = anybit.quantize_(made(t5), spec, GPTQ(batches))
    half = anybit.quantize_(made(t5), {"*": None, "encoder.*": spec}, GPTQ(iter(batches)))
    name = "decoder.block.0.layer.1.EncDecAttention.k"
    (x,) = seen_by_hooks(half, [name], batches, "attention_mask").values()
    weight = half.get_submodule(name).weight.detach()
    alone = GPTQ().quantize(weight, anybit.get_format(spec), second_moment(x)).dequantize()
    error = (whole.get_submodule(name).dequantize() - alone).norm() / alone.norm()
    assert error < 0.01  # sums in another order may move a weight on an edge
    dense = GPTQ().quantize(weight, anybit.get_format(spec), second_moment(torch.randn_like(x)))
    assert (dense.dequantize() - alone).norm() / alone.norm() > 0.05
    first = "encoder.block.0.layer.0.SelfAttention.q"
    (x,) = seen_by_hooks(made(t5), [first], batches, "attention_mask").values()
    weight = made(t5).get_submodule(first).weight.detach()
    alone = GPTQ().quantize(weight, anybit.get_format(spec), second_moment(x)).dequantize()
    assert (half.get_submodule(first).dequantize() - alone).norm() < 0.01 * alone.norm()


def test_from_disk_as_in_memory(tmp_path: Path) -> None:
    model = tiny.llama(dtype=torch.float32, vocab_size=VOCAB, num_hidden_layers=3)
    model.save_pretrained(tmp_path / "dense")
    calibration = Calibration(padded() * 2)
    calibrate_checkpoint(tmp_path / "dense", tmp_path / "out", "int4", GPTQ(calibration))
    want = anybit.quantize_(model, "int4", GPTQ(calibration))
    tiny.same_state(anybit.load(tmp_path / "out"), want)


# What cannot be right is refused, before work is done.


class Memory(nn.Module):
    """A block that reads what the block before it left behind."""

    left: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        before, Memory.left = Memory.left, x
        return x + self.linear(x if before is None else x + before)


class Rememberer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.layers = nn.ModuleList([Memory() for _ in range(3)])

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Tensor:
        Memory.left = None
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


def test_blocks_that_share_more_than_their_outputs_are_refused() -> None:
    model = made(Rememberer)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(InvalidInput, match="block 0 computes something else when it runs again"):
        anybit.quantize_(model, "int4", GPTQ(torch.randint(VOCAB, (8, 16))))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_missing_inputs_are_named_at_once() -> None:
    model = made(t5)
    with pytest.raises(InvalidInput, match=r"on token ids alone.*give batches of all that it"):
        anybit.quantize_(model, "int4", GPTQ(torch.randint(5, VOCAB, (2, 16))))
    data = Calibration(padded(decoder=True), kv_scales=True)
    with pytest.raises(InvalidInput, match="kv_scales: T5"):
        anybit.quantize_(model, "int4", GPTQ(data))


def test_padding_of_another_shape_is_refused() -> None:
    batches = sound()
    for batch in batches:  # of frames, of which the encoder makes half as many positions
        batch["attention_mask"] = torch.ones(2, 32).long()
        batch["attention_mask"][0, 20:] = 0
    assert "attention_mask" in inspect.signature(WhisperForConditionalGeneration.forward).parameters
    with pytest.raises(InvalidInput, match=r"input \(2, 16, 64\) is not of the attention mask's"):
        anybit.quantize_(made(whisper), "int4", GPTQ(batches))


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([{"input_ids": [[1, 2]]}], "'input_ids' is list; give tensors"),
        ([{"input_ids": torch.tensor([1, 2])}], r"'input_ids' has shape \(2,\)"),
        ([{"input_ids": torch.tensor([[VOCAB]])}], "outside the model's vocabulary of 96"),
        ([{"input_ids": torch.ones(1, 4)}], "token ids are integers"),
        ([{"input_ids": torch.ones(1, 4).long()}, "text"], "calibration batch 1 is str"),
        ([{"input_ids": None}], "calibration batch 0 is empty"),
        (
            [{"input_ids": torch.ones(1, 4).long(), "attention_mask": torch.ones(1, 1, 4, 4)}],
            r"a mask is \(samples, length\)",
        ),
        ([], "has 0 tokens"),
        (iter([]), "has 0 tokens"),
    ],
)
def test_bad_batches(batches: Any, message: str) -> None:
    class Tokenizer:
        def __call__(self, text: str, **options: Any) -> Any: ...

    with pytest.raises(InvalidInput, match=message):
        Calibration(batches, tokenizer=Tokenizer()).data(made(bert))
