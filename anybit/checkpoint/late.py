"""transformers' configurations and tokenizers without what their import brings and no start needs.

Validators of fields import the table of activations, and that torch's distributed tensors and
sympy; they import images and videos too, and these torchvision and torch's compiler; docstrings and
tokenizers import the table of models, and that, in some releases, `generate`, torch's compiler, and
scikit-learn and scipy where they are installed. Here these are imported when they are looked at.
Names of all models are read from 1,500 files, and once, not twice.
"""

import builtins
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

LATE = {  # modules, names that their functions may look up, and where these are
    "transformers.utils.type_validators": {
        "ACT2FN": "transformers.activations",
        "PILImageResampling": "transformers.image_utils",
        "VideoMetadataType": "transformers.video_utils",
    },
    "transformers.models.auto.auto_factory": {"GenerationMixin": "transformers.generation"},
}


class Names(dict[str, Any]):
    """Builtins of a module, beside names that are imported when one of its functions uses them."""

    def __init__(self, module: ModuleType, late: Mapping[str, str]):
        super().__init__(vars(builtins))
        self.module, self.late = module, late
        self["__import__"] = self.imported

    def imported(self, name: str, *args: Any) -> Any:
        """What an import statement of the module gets while the module is imported."""
        wanted = args[2] if len(args) > 2 else None  # after globals and locals
        if wanted and set(wanted) <= self.late.keys():
            return SimpleNamespace(**dict.fromkeys(wanted, object))  # a type, for annotations
        return builtins.__import__(name, *args)

    def __missing__(self, name: str) -> Any:
        """Called for what is neither in the module nor built in."""
        if name not in self.late:
            raise KeyError(name)
        found = getattr(import_module(self.late[name]), name)
        setattr(self.module, name, found)
        return found

    def attribute(self, name: str) -> Any:
        """The `__getattr__` of the module."""
        try:
            return self[name] if name in self.late else self.late[name]
        except KeyError:
            text = f"module {self.module.__name__!r} has no attribute {name!r}"
            raise AttributeError(text) from None


def import_late() -> None:
    """Import transformers' models by their names, and the modules of LATE, unless they are there.

    Other threads see each as a whole, or import it as it is.
    """
    import_models()
    for name, late in LATE.items():
        if name in sys.modules or (spec := find_spec(name)) is None or spec.loader is None:
            continue
        module = module_from_spec(spec)
        names = Names(module, late)
        vars(module)["__builtins__"] = names
        with suppress(ImportError):  # of other releases, which import it as they do
            spec.loader.exec_module(module)
            names["__import__"] = builtins.__import__  # to functions that import for themselves
            for each in late.keys() & vars(module).keys():
                delattr(module, each)
            vars(module)["__getattr__"] = names.attribute
            package, _, last = name.rpartition(".")
            setattr(sys.modules[package], last, sys.modules.setdefault(name, module))


def import_models() -> None:
    """Import `transformers.models` with the names that the import of `transformers` has read."""
    if "transformers.models" in sys.modules:
        return
    from transformers.utils import import_utils

    names = vars(import_utils)
    read = names["create_import_structure_from_path"]  # which keeps what it has read by paths
    folder = Path(import_utils.__file__).parents[1] / "models"
    names["create_import_structure_from_path"] = lambda path: read(
        folder if path == str(folder / "__init__.py") else path
    )
    try:
        import transformers.models  # noqa: F401
    finally:
        names["create_import_structure_from_path"] = read
