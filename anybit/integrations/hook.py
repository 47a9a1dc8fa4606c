"""Makes transformers and peft know anybit, whichever is imported first.

Both must be told of quantized layers, in some of their modules. Importing it takes seconds, so
`import anybit` does not: it waits until someone else does.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

# A module of theirs -> the one of ours whose `register` enters anybit there.
WAITED_FOR = {
    "transformers.quantizers.auto": "anybit.integrations.transformers",
    "transformers.modeling_utils": "anybit.integrations.saving",
    "peft": "anybit.integrations.peft",
}


def install() -> None:
    """Register now where the module is imported, or as soon as it is. Idempotent."""
    for name in WAITED_FOR.keys() & sys.modules.keys():
        register(name)
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())


def register(name: str) -> None:
    ours = import_module(WAITED_FOR[name])
    if hasattr(ours, "register"):  # else its own imports brought us here; it registers at its end
        ours.register()


class Finder(MetaPathFinder):
    """Steps in for these modules only: runs them as usual, and registers after that."""

    asking = False  # the other finders, for a module's spec

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in WAITED_FOR or self.asking:
            return None
        self.asking = True
        try:
            spec = find_spec(name)
        finally:
            self.asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = RegisterAfter(spec.loader)
        return spec


class RegisterAfter(Loader):
    """A loader that registers once the module has run."""

    def __init__(self, loader: Loader):
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self.loader
        register(module.__name__)
