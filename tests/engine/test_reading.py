"""What a checkpoint holds is told by its names alone, as transformers' model would tell it."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3MoeConfig

from anybit.checkpoint.architecture import bare_model
from anybit.checkpoint.stream import quantize_checkpoint
from anybit.engine import loader
from anybit.engine.llm import LLM
from anybit.engine.loader import formats_of, read_of
from anybit.engine.models.fields import asked_by
from anybit.engine.models.qwen_moe import Qwen3Moe
from anybit.engine.weights import Reading, reading
from anybit.errors import InvalidInput
from anybit.files.directory import read_json
from anybit.files.safetensors import stored_tensors
from tests.engine.conftest import ARCHITECTURES, PICO

# Whose checkpoints have other names than the engine's models ask for.
OTHER = {"gpt_oss", "lfm2_moe", "granitemoehybrid"}
HEAVY = (
    "transformers.modeling_utils",
    "transformers.generation.utils",
    "transformers.image_utils",  # which import torchvision where it is
    "transformers.video_utils",
    "torch._dynamo",
    "torch.distributed.tensor",
    "sympy",
    "scipy",
    "sklearn",
)
Checkpoint = Callable[[str], Path]


@pytest.fixture(autouse=True)
def fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields are no matter here."""
    monkeypatch.setattr(loader, "check_fields", lambda *given: None)


def read(source: Path, quantization: Any = None) -> tuple[Reading, bool]:
    """What is found in a directory, and whether transformers' model was built for that."""
    built: list[Path] = []
    formats = formats_of(read_json(source / "config.json"), source)

    def build() -> Any:
        built.append(source)
        return bare_model(source)

    found = read_of(source, stored_tensors(source), build, formats, quantization)[1]
    return found, bool(built)


def check_same(source: Path, found: Reading) -> None:
    formats = formats_of(read_json(source / "config.json"), source)
    want = reading(source, stored_tensors(source), lambda: bare_model(source), formats)
    assert found.stored == want.stored
    assert found.known == want.known
    assert found.certain >= want.certain  # of codes, which transformers does not know
    named = {name: scheme for name, scheme in want.named.items() if not name.endswith(".router")}
    assert found.named == named  # Jamba's is a linear layer in older releases, and stays dense
    old, new = vars(want.config), vars(found.config)
    assert not [name for name, value in new.items() if name[0] != "_" and old.get(name) != value]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_names_alone_tell_the_same(name: str, checkpoint: Checkpoint) -> None:
    source = checkpoint(name)
    found, built = read(source)
    assert built == (name in OTHER)
    if not built:
        check_same(source, found)


@pytest.mark.parametrize(
    "name", ["llama-biases-tied", "qwen3_moe", "deepseek_v3", "mixtral", "opt"]
)
def test_names_of_codes_tell_the_same(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    plan = {"*": "int4:group=8", "*embed_tokens": "int8"}
    quantize_checkpoint(checkpoint(name), tmp_path / "out", plan)
    found, built = read(tmp_path / "out")
    assert not built
    check_same(tmp_path / "out", found)


PLANS = {
    "all": "int8",
    "words": {"*": "int8@int8", "*embed*": "int4:group=4"},
    "head": {"*": "int8", "lm_head": "int4:group=4"},
    "some": {"*": None, "*.layers.1.*proj": "int8"},
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "name", ["llama-biases-tied", "qwen3_moe", "deepseek_v3", "mixtral", "nemotron_h", "jamba"]
)
def test_what_a_start_quantizes_is_told_the_same(
    name: str, plan: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, spec = checkpoint(name), PLANS[plan]
    want = reading(source, stored_tensors(source), lambda: bare_model(source), None, spec)
    if (name, plan) != ("llama-biases-tied", "head"):  # which gets a weight of its own
        monkeypatch.setattr(loader, "reading", None)
    found, _ = read(source, spec)
    assert found.config.tie_word_embeddings == want.config.tie_word_embeddings
    assert found.schemes == want.schemes
    named = {name: scheme for name, scheme in want.named.items() if not name.endswith(".router")}
    assert found.named == named  # Jamba's is a linear layer in older releases, and stays dense
    assert found.stored.keys() == want.stored.keys()
    assert (found.known, found.certain) == (want.known, want.certain)


@pytest.mark.parametrize("plan", [{"*": "int8", "*.mlp.gate": "int8"}, {"*.q_proj": "int8"}])
def test_plans_that_do_not_fit_are_told_by_transformers(checkpoint: Checkpoint, plan: Any) -> None:
    source = checkpoint("qwen3_moe")
    with pytest.raises(InvalidInput, match=r"no (layer|pattern) matches") as told:
        LLM(source, plan)
    with pytest.raises(InvalidInput, match=re.escape(str(told.value))):
        reading(source, stored_tensors(source), lambda: bare_model(source), None, plan)


def changed(source: Path, out: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy of a checkpoint with other tensors."""
    out.mkdir()
    tensors: dict[str, Tensor] = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_bytes((source / "config.json").read_bytes())
    return out


def with_own_head(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2


def with_head(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def with_frequencies(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)


@pytest.mark.parametrize("change", [with_own_head, with_head, with_frequencies])
def test_tensors_that_are_asked_for_elsewhere(
    checkpoint: Checkpoint, tmp_path: Path, change: Callable[[dict[str, Tensor]], None]
) -> None:
    source = changed(checkpoint("llama-biases-tied"), tmp_path / "out", change)
    for spec in (None, "int8"):
        found, built = read(source, spec)
        want = reading(source, stored_tensors(source), lambda: bare_model(source), None, spec)
        assert not built
        assert (found.schemes, found.named) == (want.schemes, want.named)
        assert found.config.tie_word_embeddings == want.config.tie_word_embeddings
        assert found.stored.keys() >= want.stored.keys()
    model = LLM(source, dtype="float32").engine.runner.model
    assert bare_model(source).config.tie_word_embeddings == (
        model.lm_head.weight is model.embed_tokens
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "no file holds 1 tensors of the model"),
        (lambda t: t.update({"model.norm.weight": torch.ones(5)}), "asks for floats of shape"),
        (lambda t: t.update({"model.norm.weight": torch.ones(64).int()}), "asks for floats of"),
        (lambda t: t.update(stranger=torch.ones(5)), "have no place in the model"),
    ],
)
def test_what_does_not_fit_is_told(
    checkpoint: Checkpoint,
    tmp_path: Path,
    change: Callable[[dict[str, Tensor]], None],
    message: str,
) -> None:
    with pytest.raises(InvalidInput, match=message):
        LLM(changed(checkpoint("llama"), tmp_path / "out", change))


def test_a_head_of_another_shape_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    other = {"lm_head.weight": torch.ones(5, 64)}
    source = changed(checkpoint("llama-biases-tied"), tmp_path / "out", lambda t: t.update(other))
    with pytest.raises(InvalidInput, match="asks for floats of shape"):
        LLM(source)


@pytest.mark.parametrize("count", [[4], {"a": 4}, True, 4.0])
def test_numbers_of_experts_that_are_none(tmp_path: Path, count: Any) -> None:
    """A model without experts may say anything of them that transformers takes."""
    out = changed(PICO, tmp_path / "out", lambda tensors: None)
    path = out / "config.json"
    path.write_text(json.dumps(read_json(path) | {"num_experts": count}))
    try:
        bare_model(out)
    except InvalidInput as reason:
        with pytest.raises(InvalidInput, match=re.escape(str(reason))):
            LLM(out)
    else:
        LLM(out)


def test_a_start_builds_no_module_for_each_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    built, init = [0], torch.nn.Module.__init__

    def count(self: torch.nn.Module, *args: Any, **given: Any) -> None:
        built[0] += 1
        init(self, *args, **given)

    monkeypatch.setattr(torch.nn.Module, "__init__", count)
    found = {}
    for experts in (2, 64):
        built[0] = 0
        config = Qwen3MoeConfig(num_experts=experts, num_hidden_layers=2)
        asked = asked_by(Qwen3Moe, config)
        assert sum(".experts." in name for name in asked.tensors) == 2 * 3 * experts
        found[experts] = built[0]
    assert found[2] == found[64]


def run(code: str) -> str:
    """What a fresh process prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "KeyError" not in done.stderr
    return done.stdout.strip()


def test_what_is_imported_late_is_there_when_it_is_looked_at() -> None:
    code = (
        "import sys, threading, torch, transformers; from anybit.checkpoint import late;"
        "late.import_models(); make, both = late.module_from_spec, threading.Barrier(2);"
        "late.module_from_spec = lambda spec: (both.wait(), make(spec))[1];"  # two come this far
        "two = [threading.Thread(target=late.import_late) for _ in range(2)];"
        "[t.start() for t in two]; [t.join() for t in two];"
        "transformers.LlamaConfig(); from transformers import AutoTokenizer;"
        "print('transformers.activations' in sys.modules);"
        "from transformers.utils import type_validators as found;"
        "from transformers.activations import ACT2FN, get_activation;"
        "transformers.LlamaConfig(hidden_act='silu');"
        "print(found is sys.modules[found.__name__], hasattr(found, 'no'), found.ACT2FN is ACT2FN)"
    )
    assert run(code).split() == ["False", "True", "False", "True"]


def test_a_function_finds_what_its_module_imports_late(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "heavy.py").write_text("class Base:\n    number = 7\n")
    (tmp_path / "folder" / "asks.py").write_text(
        "import sys\nfrom .heavy import Base\n"
        "def make(): return type('Made', (Base,), {})\n"
        "def own():\n    from .heavy import Base\n    return Base\n"
        "def wrong(): return no_such_name\n"
    )
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from anybit.checkpoint import late;"
        "late.LATE = {'folder.asks': {'Base': 'folder.heavy'}}; late.import_late();"
        "from folder import asks; name = 'folder.heavy';"
        "print(name in sys.modules, asks.own().number, asks.make().number, asks.Base.number)"
        "\ntry: asks.wrong()\nexcept NameError as error: print(error.name)"
    )
    assert run(code).split() == ["False", "7", "7", "7", "no_such_name"]


def test_names_of_models_are_read_once_from_their_files() -> None:
    code = (
        "import transformers; from transformers.utils import import_utils as found;"
        "read = []; old = found.fetch__all__;"
        "found.fetch__all__ = lambda text: (read.append(1), old(text))[1];"
        "from anybit.checkpoint.late import import_models;"
        "scan = found.create_import_structure_from_path; import_models();"
        "import transformers.models; from pathlib import Path;"
        "print(len(read), found.create_import_structure_from_path is scan);"
        "again = found.define_import_structure.__wrapped__(transformers.models.__file__);"
        "names = {n for of in again.values() for each in of.values() for n in each};"
        "print(len(read) > 1000, names <= {*dir(transformers.models)})"
    )
    assert run(code).split() == ["0", "True", "True", "True"]


def test_a_start_imports_no_models() -> None:
    """Nor torch's compiler, which takes seconds."""
    code = (
        "import gc, sys, anybit;"
        f"anybit.LLM({str(PICO)!r}, 'int8@int8', device='cpu');"
        f"llm = anybit.LLM({str(PICO)!r}, device='cpu');"
        "llm.generate(['def main('], anybit.SamplingParams(max_tokens=2));"
        f"print([n for n in {HEAVY} if n in sys.modules], gc.isenabled())"
    )
    assert run(code) == "[] True"
