"""Makes transformers know anybit, whichever of the two is imported first.

transformers finds quantization methods in registries of its module `quantizers.auto`. Importing it
takes seconds, so `import anybit` does not: it waits until someone else does.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

REGISTRIES = "transformers.quantizers.auto"


def install() -> None:
    """Register with transformers now, if it is imported, or as soon as it is. Idempotent."""
    if REGISTRIES in sys.modules:
        register()
    elif not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())


def register() -> None:
    ours = import_module("anybit.integrations.transformers")
    if hasattr(ours, "register"):  # else its own imports brought us here; it registers at its end
        ours.register()


class Finder(MetaPathFinder):
    """Steps in for one module only: runs it as usual, and registers after that."""

    asking = False  # the other finders, for that module's spec

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != REGISTRIES or self.asking:
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
        register()
