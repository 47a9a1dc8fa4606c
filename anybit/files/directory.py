"""Directories and small files, written whole or not at all; disk space; the cache folder."""

import errno
import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from anybit.errors import InvalidInput

OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt")
# Files of a model that are no weights: what tokenizers and processors read, templates, settings of
# generation, code that config.json may name, and what its licence asks to be kept.
OF_A_MODEL = (
    "*token*.json", "*token*.txt", "tekken.json", "*.model", "*.tiktoken", "*.jinja", "*.py",
    "*vocab*", "merges.txt", "*processor_config.json", "*chat_template*", "generation_config.json",
    "license*", "licence*", "notice*", "*use_policy*", "readme.md", "*.spm", "*.bpe",
)  # fmt: skip
COPY = 1 << 24  # bytes copied at a time


def read_text(path: Path) -> str:
    """A file of UTF-8 text; errors name the file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file")
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; errors name the file when it is none, or its directory."""
    if not path.is_file():
        raise FileNotFoundError(absent(path))
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise InvalidInput(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def absent(path: Path) -> str:
    """Why there is no such file in a directory that a user gave, and what to give."""
    directory = path.parent
    if directory.is_dir():
        what = f"has no {path.name}"
    else:
        what = "is a file" if directory.exists() else "does not exist"
    if path.name != "config.json":
        return f"{directory} {what}"
    return (
        f"{directory} {what}; give the directory of a model, as `anybit quantize` and "
        "`save_pretrained` write it"
    )


def quantization_of(config: dict[str, Any], source: Path) -> dict[str, Any]:
    """What a config.json says of how the model is quantized; {} when nothing."""
    found = config.get("quantization_config")
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise InvalidInput(
            f"{source}: config.json: quantization_config is {found!r}, and must be an object; "
            "repair it, or remove it from a dense model"
        )
    return found


def dense_config(source: Path) -> dict[str, Any]:
    """The config.json of a model that is to be quantized.

    Raises:
        FileNotFoundError: There is none.
        InvalidInput: It is damaged, or says that the model is quantized already.
    """
    config = read_json(source / "config.json")
    if quantization := quantization_of(config, source):
        method = quantization.get("quant_method", "an unknown method")
        raise InvalidInput(
            f"{source} is quantized already, with {method}; start from the dense one"
        )
    return config


def destination(out: str | os.PathLike[str]) -> Path:
    """Where a directory goes that a user calls `out`: the place of a link's target, not its own.

    Without links (and `..`) it is the path as it was given, which reports then show.
    """
    given, real = Path(out), Path(os.path.realpath(out))
    return given if given.name and given.absolute() == real else real


class Unmoved(InvalidInput):
    """A finished directory lies beside its place, which cannot be replaced."""


@contextmanager
def new_directory(out: Path, overwrite: bool, needed: int) -> Iterator[Path]:
    """A directory to fill with `needed` bytes that becomes `out` on a clean exit, or vanishes."""
    check_absent(out, overwrite)
    out.parent.mkdir(parents=True, exist_ok=True)
    check_space(out.parent, needed)
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    temporary.mkdir()
    try:
        yield temporary
        move_directory(temporary, out)
    except Unmoved:  # it says where the finished directory is
        raise
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if is_disk_full(error):
            raise disk_full(out.parent, needed) from error
        raise


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Make a directory, if there is none, and let no other run hold it meanwhile.

    It may be renamed then, and is removed if it is empty at the end. A process that is killed holds
    nothing any more. Windows and some network file systems have no such locks: nobody is kept out.

    Raises:
        InvalidInput: Another run holds it.
    """
    busy = InvalidInput(
        f"another run is writing into {directory}; wait for its end, or choose another directory"
    )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = None if os.name == "nt" else os.open(directory, os.O_RDONLY)
    except (FileExistsError, FileNotFoundError):
        if directory.is_symlink() or directory.is_file() or not directory.parent.is_dir():
            raise
        raise busy from None  # it was there and then not, or the other way round

    def there() -> bool:
        try:
            return handle is None or os.path.samestat(os.fstat(handle), directory.stat())
        except FileNotFoundError:
            return False

    try:
        # If it is not there, its run has just ended.
        if handle is not None and not (lock(handle) and there()):
            raise busy
        try:
            yield
        finally:
            if there():
                with suppress(OSError):  # not empty
                    directory.rmdir()
    finally:
        if handle is not None:
            os.close(handle)


def lock(handle: int) -> bool:
    """Whether nobody else has locked an open file; then it is ours until it is closed."""
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks here
        pass
    return True


def check_absent(out: Path, overwrite: bool) -> None:
    """Raise where a finished directory cannot take the place of `out`.

    Raises:
        FileExistsError: It is not free, and holds no checkpoint that may be overwritten.
        InvalidInput: It can only be filled, and not replaced.
    """
    if not out.exists():
        return
    here = Path.cwd().is_relative_to(os.path.realpath(out))
    if here or os.path.ismount(out):
        what = "the working directory is in it" if here else "it is a mount point"
        raise InvalidInput(
            f"{out} cannot be replaced, since {what}; choose a new directory, such as "
            f"{out / 'model'}"
        )
    if out.is_dir() and not any(out.iterdir()):
        return
    if not overwrite:
        raise FileExistsError(f"{out} exists; choose another directory, or pass overwrite=True")
    if not (out / "config.json").is_file():
        raise FileExistsError(
            f"{out} exists and holds no checkpoint (no config.json), so it is not overwritten; "
            "choose another directory"
        )


def move_directory(source: Path, out: Path) -> None:
    """Put a finished directory in the place of `out`, whose old contents go only after that.

    Raises:
        Unmoved: `out` stays where it is, as a bind mount does, of which nothing tells before.
    """
    for path in source.rglob("*"):
        if path.is_file():
            sync(path)
    sync(source)
    old = out.with_name(f".{out.name}.{os.getpid()}.old")
    try:
        if out.exists():
            os.rename(out, old)
        os.rename(source, out)
    except BaseException as error:
        if old.exists():
            os.rename(old, out)
        if isinstance(error, OSError) and error.errno in (errno.EBUSY, errno.EXDEV):
            raise Unmoved(
                f"{out} cannot be replaced ({error.strerror}), as a mount point or a directory of "
                f"a container's image; the finished directory is {source}: rename that one"
            ) from error
        raise
    sync(out.parent)
    shutil.rmtree(old, ignore_errors=True)


def copy_others(source: Path, out: Path) -> list[str]:
    """Copy the files of a model that are no weights, and nothing else that lies beside them.

    Not config.json, nor what `out` has already. Returns the names.
    """
    copied = []
    for path in sorted([*source.glob("*"), *source.glob("additional_chat_templates/*.jinja")]):
        name = path.relative_to(source)
        known = any(fnmatchcase(path.name.lower(), pattern) for pattern in OF_A_MODEL)
        hidden = path.name.startswith(".")
        if path.is_file() and known and not hidden and not (out / name).exists():
            (out / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, out / f"{name}.tmp")
            os.replace(out / f"{name}.tmp", out / name)
            copied.append(str(name))
    return copied


def cache_folder(folder: str | Path | None = None) -> Path:
    """Where things lie that can be made again: `folder`, $ANYBIT_CACHE, or the user's cache."""
    folder = folder or os.environ.get("ANYBIT_CACHE")
    if folder:
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anybit"


def check_folder(path: Path) -> None:
    """ValueError when there is no directory to write a file into; call it before the work."""
    if not path.parent.is_dir():
        raise InvalidInput(
            f"{path.parent} is no directory to write {path.name} into; make it first"
        )
    if path.is_dir():
        raise InvalidInput(f"{path} is a directory; name a file in it to write")


def without_nan(row: dict[str, Any]) -> dict[str, Any]:
    """The row with None for nan, which JSON does not have."""
    return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()}


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def sync(path: Path) -> None:
    """Make a file's contents, or a directory's entries, survive a power cut."""
    if os.name == "nt" and path.is_dir():  # directories cannot be opened there
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_space(directory: Path, needed: int) -> None:
    """OSError (ENOSPC) when `needed` bytes do not fit on the disk of `directory`."""
    if needed > shutil.disk_usage(directory).free:
        raise disk_full(directory, needed)


def disk_full(directory: Path, needed: int, advice: str = "") -> OSError:
    free = shutil.disk_usage(directory).free
    return OSError(
        errno.ENOSPC,
        f"not enough disk space in {directory}: {megabytes(needed)} are needed, "
        f"{megabytes(free)} are free{advice}",
    )


def megabytes(count: int) -> str:
    """Bytes in words."""
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"


def is_disk_full(error: BaseException) -> bool:
    """Also for errors of the safetensors library, which are no OSError."""
    return getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
