"""Other tools' checkpoints where one of ours is wanted: converted once, into the cache folder."""

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path

from anybit.checkpoint.foreign.convert import METHODS, convert_checkpoint, quantization_of
from anybit.checkpoint.foreign.gguf_file import is_gguf, read_model
from anybit.checkpoint.rewrite import fingerprint
from anybit.files.directory import cache_folder, read_json
from anybit.files.safetensors import stored_tensors
from anybit.version import __version__

log = logging.getLogger(__name__)


def ready(directory: Path) -> Path:
    """A directory with the same model that anybit reads: itself, or a conversion in the cache.

    directory: of a model; or a GGUF file.

    Raises:
        FileNotFoundError: Files are missing.
        InvalidInput: As `convert_checkpoint` does.
        OSError: The disk of the cache folder is too small.
    """
    if is_gguf(directory):
        stored = {name: block.stored for name, block in read_model(directory).tensors.items()}
    else:
        config = read_json(directory / "config.json")
        if (quantization_of(directory, config) or {}).get("quant_method") not in METHODS:
            return directory
        stored = stored_tensors(directory)
    what = [__version__, str(directory.resolve()), fingerprint(directory, stored)]
    key = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
    out = cache_folder() / "converted" / f"{directory.resolve().name}-{key}"
    if not (out / "config.json").is_file():
        log.warning("%s is another tool's; its conversion is kept in %s", directory, out)
        own = out.with_name(f"{out.name}.{os.getpid()}")  # another process may do the same
        convert_checkpoint(directory, own, overwrite=True)
        try:
            own.rename(out)
        except OSError:  # the other was first
            if not (out / "config.json").is_file():
                raise
            shutil.rmtree(own)
    return out
