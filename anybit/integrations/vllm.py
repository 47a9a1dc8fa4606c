"""anybit as a quantization method of vLLM: the plugin that vLLM finds, and its configuration.

    vllm serve OUT                      # a checkpoint of anybit names its method in config.json
    vllm.LLM(DENSE, quantization="anybit", hf_overrides={"anybit": {"formats": "fp6"}})
    vllm.LLM(FOREIGN, quantization="anybit")         # GPTQ's, AWQ's, ...: what `convert` reads

Checked with vLLM 0.32 and 0.33. The plugin implements vLLM's abstract classes, and nothing of
vLLM's own methods: `vllm_linear.py` loads linear layers, `vllm_moe.py` experts, `vllm_foreign.py`
those of other tools, and `vllm_products.py` multiplies.
"""

import inspect
import logging
import math
import re
from contextlib import nullcontext, suppress
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
import vllm.config.cache
from torch import nn
from vllm.model_executor.layers.quantization import (
    get_quantization_config,
    register_quantization_config,
)
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)

from anybit.checkpoint.architecture import bounded, empty_model
from anybit.checkpoint.layout import check_missing
from anybit.checkpoint.names import Names
from anybit.checkpoint.places import missing, saved_names
from anybit.core.packed import is_codes
from anybit.engine.weights import plan_text
from anybit.errors import InvalidInput, Unsupported
from anybit.files.directory import stated_quantization
from anybit.files.safetensors import Stored as StoredTensor
from anybit.integrations.vllm_foreign import Source, directory_of, in_files, planned
from anybit.integrations.vllm_names import block_and_last, merged_in, renamed, transformers_class
from anybit.kernels.registry import BACKENDS
from anybit.nn.embedding import embedding_layers
from anybit.nn.experts import split
from anybit.nn.model import linear_schemes
from anybit.nn.plan import METHOD, patterns_for, plan_of
from anybit.nn.tied import tied_heads

OVERRIDE = "anybit"  # what `hf_overrides` calls the options below
OPTIONS = ("formats", "backend")
# Tensors of experts in codes, unless they are renamed already: models have loaders within loaders.
EXPERTS = re.compile(r"(\.experts\.\d+\.\w+\.)(?!weight|bias$)(\w+)$")


def register() -> None:
    """Enter the method into vLLM's registry; the entry point, called in every process."""
    try:
        if get_quantization_config(METHOD) is AnybitConfig:
            return
    except ValueError:  # not there yet
        pass
    register_quantization_config(METHOD)(AnybitConfig)
    # Lines of ours go where vLLM's go: it gives a handler to its own loggers alone.
    logging.getLogger("anybit").parent = logging.getLogger("vllm")
    if hasattr(vllm.config.cache, "register_kv_cache_dtype"):  # since vLLM 0.33
        from anybit.integrations import vllm_attention

        vllm_attention.register()
    if find_spec("llvmlite"):
        # On a CPU, vLLM reads `vars` of all that modules hold, and this object has none: whatever
        # it is asked for, `__dict__` included, it gives a function of LLVM's.
        from llvmlite.binding import ffi

        ffi.lib._fntab["__dict__"] = {}


class AnybitConfig(QuantizationConfig):
    """Which format each linear layer has, and which kernels multiply.

    formats: {glob: scheme or None}, as in `quantize_`; None until `maybe_update_config` finds them
        in the overrides, or in another tool's checkpoint. They describe the layers of a quantized
        checkpoint, or say what a dense one is quantized to while it is loaded (round to nearest).
    backend: a name in `registry.BACKENDS` for all layers; None lets each layer have the first that
        takes it. Part of the model's config, which vLLM's compile cache depends on, and not of the
        environment, which it does not.
    """

    def __init__(
        self,
        formats: dict[str, str | None] | None = None,
        backend: str | None = None,
        foreign: bool = False,
    ):
        super().__init__()
        self.formats, self.backend, self.foreign = formats, backend, foreign
        # Its name and revision, and where weights are downloaded to.
        self.checkpoint: tuple[str, str | None, str | None] | None = None
        self.source: Source | None = None  # of the layers of another tool's checkpoint
        self.names: dict[str, str] = {}  # vLLM's names of layers -> the checkpoint's
        self.saved: dict[str, str] = {}  # layers of the checkpoint -> their names in the plan
        self.coded: set[str] = set()  # layers that the checkpoint holds in codes
        self.dense: set[str] = set()  # layers and embeddings whose weight it holds
        self.on_load: dict[str, str] = {}  # schemes of layers to be quantized while loading
        self.tied = False  # whether the head shares the embeddings' weight
        self.words: dict[str, int] = {}  # embeddings in codes -> their rows
        self.sharing: dict[str, str] = {}  # heads without tensors of their own -> those embeddings
        self.claimed = set[str]()  # embeddings that vLLM has asked about
        self.rows: dict[str, int] = {}  # of layers of the checkpoint
        self.alike: dict[str, dict[str, list[str]]] = {}  # names, by block and by their last part
        self.block = ""  # that vLLM is building
        self.taken: dict[str, str] = {}  # layers -> what vLLM calls the layer that holds them
        self.renamings: list[Any] = []  # of transformers, from names in files to those of its model
        self.renamed: dict[str, str] = {}  # transformers' names of layers -> vLLM's
        self.moved: dict[str, str] = {}  # how names begin -> how they do in vLLM's model

    @classmethod
    def get_name(cls) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "AnybitConfig":
        """From a checkpoint's `quantization_config`, checked as transformers checks it."""
        from anybit.integrations.transformers import AnybitConfig as Checked

        if config.get("quant_method") != METHOD:
            return cls(foreign=True)
        return cls(Checked(**config).formats)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> Any:
        """Claims other tools' checkpoints for a user who asks for anybit."""
        return METHOD if user_quant == METHOD else None

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Read `hf_overrides`, and what the checkpoint's files hold."""
        from vllm.transformers_utils.config import get_safetensors_params_metadata
        from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

        frame = inspect.currentframe()  # vLLM gives no method its settings of the loader
        caller = frame.f_back.f_locals if frame and frame.f_back else {}
        cache = getattr(caller.get("load_config"), "download_dir", None)
        self.checkpoint = model_name, revision, cache
        saved = get_hf_file_to_dict("config.json", model_name, revision) or {}
        if (
            self.formats is None and not self.foreign
        ):  # which a file of its own may say, where vLLM reads config.json
            described = directory_of(model_name, revision, wanted=["*.json"])
            self.foreign |= stated_quantization(described, saved) is not None
        if self.foreign:
            directory = directory_of(*self.checkpoint)
            work = planned(directory)
            self.formats = dict(work.formats)
            schemes = {name: layer.scheme for name, layer in work.layers.items()}
            self.source = Source(directory, schemes)
            if hf_config is not None and "tie_word_embeddings" in work.new_config:
                hf_config.tie_word_embeddings = work.new_config["tie_word_embeddings"]
            self.source.check()
        self._override(getattr(hf_config, OVERRIDE, None), model_name)
        stored = get_safetensors_params_metadata(model_name, revision=revision)
        shapes = {n: tuple(entry["shape"]) for n, entry in stored.items() if "shape" in entry}
        self._survey(shapes, hf_config, model_name, saved.get("architectures"))

    def _override(self, given: Any, model_name: str) -> None:
        options = {"formats": given} if isinstance(given, str) else dict(given or {})
        if unknown := set(options) - set(OPTIONS):
            raise InvalidInput(
                f"hf_overrides[{OVERRIDE!r}] has {', '.join(sorted(map(str, unknown)))}; known: "
                f"{', '.join(OPTIONS)}"
            )
        formats, backend = options.get("formats"), options.get("backend")
        if backend is not None and backend not in BACKENDS:
            raise InvalidInput(f"unknown backend {backend!r}; known: {', '.join(BACKENDS)}")
        self.backend = backend or self.backend
        if formats is not None and self.formats is not None:
            raise InvalidInput(
                f"{model_name} is quantized already ({plan_text(self.formats)}); leave out "
                "formats, or load the dense model"
            )
        if formats is not None:
            self.formats = plan_of(formats)
        if self.formats is None:
            raise InvalidInput(
                f"{model_name} is not quantized; quantization={METHOD!r} quantizes it while it is "
                f"loaded, and needs a format: hf_overrides={{{OVERRIDE!r}: {{'formats': 'fp6'}}}}"
            )

    def _survey(
        self,
        shapes: dict[str, tuple[int, ...]],
        config: Any = None,
        model_name: str = "the model",
        architectures: list[str] | None = None,
    ) -> None:
        """Note which layers are stored in codes, or what a dense checkpoint's layers become.

        The latter is what `quantize_` would do with transformers' model of this configuration.

        shapes: of the tensors in the checkpoint's files. architectures: as in its config.json,
            where `hf_overrides` may have changed the configuration's.

        Raises:
            InvalidInput: A dense checkpoint's model is unknown; tensors of a known model are in no
                file, for which vLLM would take what lies in memory.
        """
        self.coded = {name.rpartition(".")[0] for name in shapes if is_codes(name)}
        if self.source is not None:
            self.coded = set(self.source.schemes)
        matrices = {n for n, shape in shapes.items() if n.endswith(".weight") and len(shape) == 2}
        self.dense = {name.removesuffix(".weight") for name in matrices} - self.coded
        planes = (name for name in shapes if name in matrices or is_codes(name))
        self.rows = {name.rpartition(".")[0]: shapes[name][0] for name in planes}
        # Of a model that only vLLM can build, a plan goes by the files' names.
        only_vllm = suppress(InvalidInput, ImportError) if self.coded else nullcontext()
        own = None
        with only_vllm:
            kind = transformers_class(config, architectures, model_name)
            nbytes = sum(2 * math.prod(shape) for shape in shapes.values())  # in 16 bits
            with bounded(model_name, list(shapes.values()), nbytes):
                own = empty_model(model_name, kind, config)
        if own is not None:
            self.renamings = Names(own).renamings
            self._look_up(own, config, shapes)
            if shapes:
                weights = (f"{layer}.weight" for layer in self.coded)
                lost = missing(Names(own), split(own), [*shapes, *weights], ())
                check_missing(model_name, lost, ())
        known = self.coded | self.dense | self.on_load.keys() | self.sharing.keys()
        self.names = {name: name for name in known}
        if base := getattr(own, "base_model_prefix", ""):
            # Of a base model (AutoModel), as embeddings come from, vLLM builds the whole one.
            self.names = {f"{base}.{name}": name for name in known} | self.names

    def _look_up(self, own: Any, config: Any, shapes: dict[str, tuple[int, ...]]) -> None:
        """Note names and schemes of layers by transformers' model, its experts as they are."""
        if not self.coded:
            table, schemes = Names(own), linear_schemes(own, self.formats or {})
            if words := schemes.keys() & embedding_layers(own).keys():
                raise InvalidInput(
                    f"{min(words)}: embeddings are not quantized while vLLM loads a model; use "
                    "`anybit quantize` first, or leave them out"
                )
            stored = {table.stored(f"{layer}.weight"): s for layer, s in schemes.items()}
            self.on_load = {name.removesuffix(".weight"): s for name, s in stored.items()}
            self.tied = bool(getattr(config, "tie_word_embeddings", False))
        else:
            saved = saved_names(own, self.coded | self.dense)
            stored = {saved.get(name, name): name for name in self.coded}
            found = {name: stored[name] for name in embedding_layers(own).keys() & stored.keys()}
            if self.source is not None:
                if found:
                    raise Unsupported(
                        f"{min(found.values())}: another tool has quantized the embeddings, which "
                        "vLLM reads from a checkpoint of anybit alone; make one with `anybit "
                        "convert`"
                    )
                return
            self.saved = saved
            self.words = {there: self.rows[there] for there in found.values()}
            table = Names(own)
            for head, name in tied_heads(own).items():
                if name in found and head not in stored:
                    there = table.stored(f"{head}.weight").removesuffix(".weight")
                    self.sharing[there], self.saved[there] = found[name], head

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Note the names that the model gives to the checkpoint's layers."""
        known, self.names, self.alike, self.renamed = self.names, {}, {}, {}
        for ours, theirs in known.items():  # a mapper may look for `lm_head.`, with its dot
            if weight := hf_to_vllm_mapper.map_name(f"{ours}.weight"):
                self.names[weight.removesuffix(".weight")] = theirs

    def get_checkpoint_weight_mapper(self) -> Any:
        """How names are changed when they are read; vLLM asks when all layers are built.

        Planes and scales of experts are called as their weights, which all of vLLM's models find.
        """
        from vllm.model_executor.models.utils import WeightsMapper

        from anybit.integrations.vllm_linear import take_over

        frame = inspect.currentframe()  # vLLM gives no method the model
        loader = frame.f_back.f_locals.get("self") if frame and frame.f_back else None
        model = getattr(loader, "module", None)
        if isinstance(model, nn.Module) and self.coded:
            for merged, parts in merged_in(model).items():
                self.packed_modules_mapping.setdefault(merged, parts)
            take_over(model, self.method_at)
        if self.source is not None:
            return super().get_checkpoint_weight_mapper() | WeightsMapper(
                orig_to_new_prefix=self.moved
            )
        return WeightsMapper(
            orig_to_new_regex={EXPERTS: r"\1weight_\2"}, orig_to_new_prefix=self.moved
        )

    def scheme(self, prefix: str) -> str | None:
        """The scheme of a layer, by vLLM's name of it; None for one that is not quantized."""
        name = self.names.get(prefix, prefix)
        if not self.coded:
            return self.on_load.get(name)
        if name not in self.coded and name not in self.sharing:
            return None
        if self.source is not None:
            return self.source.schemes[name]
        plan = self.formats or {}
        matches = patterns_for(self.saved.get(name, name), plan, name in self.words)
        scheme = plan[matches[-1]] if matches else None
        if scheme is None:
            raise InvalidInput(
                f"{name}: the checkpoint holds codes, but config.json names no format for it "
                f"({plan_text(plan)}); copy it again"
            )
        return scheme

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """The method of a layer that vLLM is about to build."""
        # Imported here, since vLLM loads plugins before it has chosen a platform.
        from vllm.model_executor.layers.fused_moe import RoutedExperts
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
        from vllm.model_executor.layers.vocab_parallel_embedding import (
            ParallelLMHead,
            VocabParallelEmbedding,
        )

        if isinstance(layer, RoutedExperts):
            from anybit.integrations.vllm_moe import method_for

            return method_for(self, layer, prefix)
        if isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead):
            return self.embedding_method(prefix, layer.org_vocab_size)
        if not isinstance(layer, LinearBase | ParallelLMHead):
            return None
        if self.names.get(prefix, prefix) in self.sharing:
            from anybit.integrations.vllm_embedding import Tied

            return Tied([prefix], [None], [], self.backend)
        self.check_claimed(prefix)
        method = self.linear_method(prefix)
        return UnquantizedLinearMethod() if not method and isinstance(layer, LinearBase) else method

    def linear_method(self, prefix: str) -> QuantizeMethodBase | None:
        """The method of a linear layer; None: no part of it is quantized."""
        from anybit.integrations import vllm_fusion
        from anybit.integrations.vllm_linear import OnLoad, Stored

        vllm_fusion.enable()
        names = self.parts(prefix)
        schemes = [self.scheme(name) for name in names]
        rows = [self.rows_of(name) for name in names]
        if any(self.names.get(name, name) in self.coded for name in names):
            original = None if self.checkpoint is None else self.in_files
            return Stored(names, schemes, rows, self.backend, self.layers_of_others(), original)
        if any(schemes):
            return OnLoad(names, schemes, rows, self.backend, self.tied)
        return None

    def method_at(self, path: str) -> QuantizeMethodBase | None:
        """The method of a linear layer by its path in vLLM's model; None: it is in no codes."""
        parent, dot, last = path.rpartition(".")
        packed = self.packed_modules_mapping.get(last, [])
        parts = [path, *(parent + dot + part for part in packed)]
        coded = any(self.names.get(self.renamed_to(part)) in self.coded for part in parts)
        return self.linear_method(path) if coded else None

    def embedding_method(self, prefix: str, rows: int) -> QuantizeMethodBase | None:
        """The method of an embedding, which some of vLLM's models build without its name.

        rows: of the checkpoint's embedding.
        """
        from anybit.integrations.vllm_embedding import Embedding

        name = self.names.get(prefix, prefix)
        unnamed = [own for own, n in self.words.items() if n == rows] if not prefix else []
        if len(unnamed) == 1:
            name = unnamed[0]
        if name not in self.words:
            return None
        self.claimed.add(name)
        theirs = next(n for n, own in self.names.items() if own == name)
        scheme = self.scheme(theirs)
        assert scheme is not None
        heads = [self.scheme(head) for head, own in self.sharing.items() if own == name]
        return Embedding(theirs, scheme, self.backend, heads[0] if heads else None)

    def check_claimed(self, prefix: str) -> None:
        """Unsupported when vLLM builds a layer behind embeddings that it has not asked about."""
        from vllm.distributed import get_pp_group

        left = self.words.keys() - self.claimed
        for theirs, own in self.names.items() if left else ():
            behind = own in left and prefix.startswith(f"{theirs.rpartition('.')[0]}.")
            if behind and get_pp_group().is_first_rank:
                raise Unsupported(
                    f"{theirs}: vLLM's model takes no quantized embeddings; leave them out of the "
                    "formats, or run the model in anybit.LLM"
                )

    def layers_of_others(self) -> Source | None:
        """The layers that another tool quantized, by vLLM's names, which are known by now."""
        return None if self.source is None else replace(self.source, names=self.names)

    def in_files(self, name: str, key: str) -> StoredTensor:
        """A tensor of a layer, by vLLM's name, as the checkpoint's files hold it."""
        assert self.checkpoint is not None
        return in_files(directory_of(*self.checkpoint))[f"{self.names[name]}.{key}"]

    def rows_of(self, name: str) -> int:
        """Rows of a layer of the checkpoint, by vLLM's name; 0: it has none of that name."""
        source = self.layers_of_others()
        if source is not None and source.has(name):
            return source.rows(name)
        return self.rows.get(self.names.get(name, name), 0)

    def parts(self, prefix: str) -> list[str]:
        """The checkpoint's layers, by vLLM's names, that make up a layer of vLLM's."""
        parent, dot, last = prefix.rpartition(".")
        packed = self.packed_modules_mapping.get(last, [])
        parts = [self.place(parent + dot + part, prefix) for part in packed]
        if any(part in self.names for part in parts):
            return parts
        whole = self.place(prefix, prefix)
        return [whole] if whole in self.names else parts or [whole]

    def place(self, name: str, prefix: str) -> str:
        """The name under which vLLM finds a layer's tensors.

        The files may have another of the names that transformers takes for the same layer. Then all
        names that begin so are renamed when they are read.

        Some models build a layer under another path than the one where they keep it, or even
        under another number (Mamba's mixers). It is then the only layer of its name in the block,
        or else in the block that is being built, and no other layer holds it.
        """
        found = self.renamed_to(name)
        if found in self.names and found != name:
            self.move(found, name)
        elif name not in self.names:
            if not self.alike:
                for known in self.names:
                    block, last = block_and_last(known)
                    self.alike.setdefault(block, {}).setdefault(last, []).append(known)
            block, last = block_and_last(name)
            others = self.alike.get(block, self.alike.get(self.block, {})).get(last, [])
            free = [other for other in others if self.taken.get(other, prefix) == prefix]
            found = free[0] if block and len(others) == len(free) == 1 else name
        if found not in self.names:
            return name
        if self.taken.setdefault(found, prefix) != prefix:
            raise Unsupported(
                f"{prefix}: vLLM's model has this layer and {self.taken[found]}, the checkpoint "
                f"only {found}; leave it unquantized, or run the model in anybit.LLM"
            )
        self.block = block_and_last(found)[0]
        return found

    def renamed_to(self, name: str) -> str:
        """The layer of the checkpoint, by vLLM's name, that transformers takes a name for."""
        if name in self.names or not self.renamings:
            return name
        if not self.renamed:
            self.renamed = {renamed(known, self.renamings): known for known in self.names}
        return self.renamed.get(renamed(name, self.renamings), name)

    def move(self, name: str, there: str) -> None:
        """Have tensors whose names begin as this layer's go where vLLM's model has them."""
        old, new = name.split("."), there.split(".")
        while old[1:] and new[1:] and old[-1] == new[-1]:
            old, new = old[:-1], new[:-1]
        start, end = ".".join(old) + ".", ".".join(new) + "."
        if end.startswith(start) and any(known.startswith(end) for known in self.names):
            raise Unsupported(
                f"{name}: vLLM's model calls it {there}, as other layers of the checkpoint are "
                "called; run the model in anybit.LLM"
            )
        self.moved[start] = end
