"""Models by name: `org/name` of the Hugging Face hub, as a directory on this machine.

A path that exists is itself. Else the files that a model needs, and no others, come through
huggingface_hub into its cache; its tokens and switches apply (HF_HOME, HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE).
"""

import difflib
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anybit.errors import AnybitError, InvalidInput, Unsupported, in_a_line
from anybit.files.directory import (
    LEFT_OUT,
    OTHER_WEIGHTS,
    WEIGHTS_OF_ALL,
    check_space,
    is_disk_full,
    matches,
    read_json,
)
from anybit.files.safetensors import INDEX, WEIGHTS, Stored, stored_tensors
from anybit.progress import Progress, progress, say

CONFIG = "config.json"
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
MAIN = "main"
NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?(?::([\w.-]+))?")
ENDS_OF_PATHS = (".gguf", ".safetensors", ".json", ".jsonl", ".txt")
PART_OF_MODEL = re.compile(r"(?:additional_chat_templates|\d+_[A-Za-z]\w*)/[^/]+$")
PART = re.compile(r"-\d{5}-of-\d{5}$")
CACHED = re.compile(r"models--([^/\\]+?)--([^/\\]+)[/\\]snapshots[/\\][^/\\]+")


@dataclass(frozen=True)
class Name:
    """A model of the hub.

    Attributes:
        repository: "org/name".
        revision: A branch, tag or commit.
        variant: Of a repository of GGUF files, the one that is meant: "Q4_K_M".
    """

    repository: str
    revision: str = MAIN
    variant: str | None = None

    def __str__(self) -> str:
        return self.repository + (f"@{self.revision}" if self.revision != MAIN else "")


def name_of(model: str | os.PathLike[str]) -> Name | None:
    """A model of the hub, if a text names one and no path: org/name[@revision][:Q4_K_M]."""
    text = os.fspath(model)
    found = NAME.fullmatch(text)
    if found is None or os.path.lexists(text) or (not found[3] and text.endswith(ENDS_OF_PATHS)):
        return None
    return Name(found[1], found[2] or MAIN, found[3])


def located(model: str | os.PathLike[str]) -> Path:
    """The directory or GGUF file of a model, which is downloaded if it is named `org/name`.

    Args:
        model: A path, or org/name[@revision] of the hub, with :Q4_K_M where it holds GGUF files.

    Returns:
        The path as it is, or the place in the hub's cache.

    Raises:
        FileNotFoundError: Neither a path nor a model of the hub.
        InvalidInput: The hub refuses to give it, or it has no files that can be read.
        Unsupported: The hub cannot be reached, and its cache has no copy.
        OSError: The disk of the cache is too small.
    """
    name = name_of(model)
    return Path(model) if name is None else download(name)


def repository_of(path: str | os.PathLike[str]) -> str | None:
    """The "org/name" of a path in the hub's cache."""
    found = CACHED.search(os.path.abspath(path))
    return f"{found[1]}/{found[2]}" if found else None


def title(path: Path) -> str:
    """What files that are made of a model are called after: its repository, or its own name."""
    repository = None if path.suffix == ".gguf" else repository_of(path)
    return (repository or os.path.abspath(path)).rpartition("/")[2]


def download(name: Name, weights: bool = True) -> Path:
    """A model in the hub's cache, after what is missing there has come.

    Args:
        name: The model.
        weights: False: its small files only.
    """
    listed = listing(name)
    if listed is None:
        return in_cache(name)
    commit, sizes = listed
    wanted = needed(name, sizes, lambda file: read_json(fetch(name, file, commit)))
    if not weights:
        wanted = [file for file in wanted if not file.endswith((".safetensors", ".gguf"))]
    missing = [file for file in wanted if not is_cached(name, file, commit)]
    if missing:
        size = sum(sizes[file] or 0 for file in missing)
        check_space(existing(cache(name)), size)
        with progress(f"downloading {name}", size) as step:
            for file in missing:
                fetch(name, file, commit, step)
    now = snapshot(name)
    if now is None or now.name != commit:
        fetch(name, wanted[0], name.revision)  # notes the commit, for a day without network
    return place(fetch(name, wanted[0], commit), name)


def peek(model: str | os.PathLike[str]) -> tuple[Path, dict[str, Stored]]:
    """A model's directory and the headers of its tensors, without their contents.

    Of a model of the hub whose weights are not here, only config.json and what else is small comes,
    and the tensors lie in no file.

    Raises:
        As `located` and `stored_tensors` do.
    """
    from huggingface_hub import HfApi

    name = name_of(model)
    if name is None or name.variant:
        path = located(model)
        return path, stored_tensors(path)
    path = download(name, weights=False)
    files = [WEIGHTS]
    if (path / INDEX).is_file():
        files = sorted(set(read_json(path / INDEX)["weight_map"].values()))
    if all((path / file).is_file() for file in files):
        return path, stored_tensors(path)

    def read(file: str) -> dict[str, Stored]:
        with told(name):
            found = HfApi().parse_safetensors_file_metadata(
                name.repository, file, revision=path.name
            )
        return {
            key: Stored(path / file, t.dtype, tuple(t.shape), t.data_offsets[0], size)
            for key, t in found.tensors.items()
            for size in [t.data_offsets[1] - t.data_offsets[0]]
        }

    with ThreadPoolExecutor(8) as pool:
        return path, {key: t for part in pool.map(read, files) for key, t in part.items()}


def listing(name: Name) -> tuple[str, dict[str, int | None]] | None:
    """The commit and its files with their sizes; None where the cache has to do."""
    from huggingface_hub import HfApi

    try:
        with told(name):
            found = HfApi().model_info(name.repository, revision=name.revision, files_metadata=True)
    except Unsupported:
        if snapshot(name) is None:
            raise
        say(f"{name}: the hub cannot be reached; taking the copy in its cache")
        return None
    return found.sha or name.revision, {s.rfilename: s.size for s in found.siblings or ()}


def fetch(name: Name, file: str, revision: str, step: Progress | None = None) -> Path:
    """Where a file lies in the cache, to which it is downloaded if it is missing."""
    from huggingface_hub import hf_hub_download

    class Bar:
        """What huggingface_hub counts bytes with."""

        def __init__(self, *args: Any, initial: int = 0, **options: Any):
            self.update(initial)

        def update(self, count: float | None = 1) -> None:
            if step:
                step(int(count or 0), file)

        def __enter__(self) -> "Bar":
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def __getattr__(self, what: str) -> Callable[..., None]:
            return lambda *args, **options: None

    with told(name):
        options: Any = {"tqdm_class": Bar}
        found = hf_hub_download(name.repository, file, revision=revision, **options)
    return Path(found)


def is_cached(name: Name, file: str, commit: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name.repository, file, revision=commit), str)


# The cache.


def cache(name: Name) -> Path:
    """The repository's folder in the hub's cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{name.repository.replace('/', '--')}"


def snapshot(name: Name) -> Path | None:
    """The folder of a revision's files, if there are any."""
    ref = cache(name) / "refs" / name.revision
    commit = ref.read_text("utf-8") if ref.is_file() else name.revision
    folder = cache(name) / "snapshots" / commit
    return folder if folder.is_dir() else None


def in_cache(name: Name) -> Path:
    """The copy of a model in the cache, if it is whole."""
    folder = snapshot(name)
    assert folder is not None
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    try:
        wanted = needed(name, files, lambda file: read_json(folder / file))
    except (InvalidInput, FileNotFoundError) as error:
        raise Unsupported(f"the hub cannot be reached, and in its cache {error}") from None
    return place(folder / wanted[0], name)


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def place(file: Path, name: Name) -> Path:
    """What anybit reads: of a GGUF file, the file; else the directory of config.json."""
    return file if name.variant else file.parent


# Which files.


def needed(
    name: Name, files: Collection[str], read: Callable[[str], Mapping[str, Any]]
) -> list[str]:
    """The files that a model, or an adapter, is read from, the first of which names its place.

    Args:
        name: The model.
        files: Those of the repository.
        read: Gives one, of JSON.

    Raises:
        FileNotFoundError: Some are not there.
        InvalidInput: There are none that can be read.
    """
    if name.variant:
        return gguf_files(name, files)
    weights = {WEIGHTS}
    if WEIGHTS not in files and INDEX in files:
        found = read(INDEX).get("weight_map")
        weights = {INDEX, *found.values()} if isinstance(found, dict) else {INDEX}
    small = [f for f in files if is_small(f) and f not in (CONFIG, INDEX)]
    if CONFIG not in files and set(ADAPTER) <= set(files):
        return [*ADAPTER]
    if CONFIG in files and weights <= set(files):
        return [CONFIG, *sorted(weights), *sorted(small)]
    if CONFIG in files and INDEX in weights:
        lost = sorted(weights - set(files))
        raise FileNotFoundError(f"{name} has no {lost[0]}, which {INDEX} names")
    if variants := sorted(set(map(variant_of, gguf_models(files)))):
        raise InvalidInput(
            f"{name} has GGUF files; name one of them: {name}:{variants[0]} "
            f"(there are {', '.join(variants)})"
        )
    if CONFIG not in files:
        raise InvalidInput(f"{name} has no {CONFIG}, so it is not a model of transformers")
    others = [f for f in files if f.endswith((*OTHER_WEIGHTS, ".safetensors"))]
    raise InvalidInput(
        f"{name} has no {WEIGHTS} or {INDEX}{f', only {others[0]}' if others else ''}; other files "
        "of weights are not downloaded: look for a revision or a repository that has safetensors"
    )


def is_small(file: str) -> bool:
    """Whether a file belongs to a model beside its weights, as `copy_others` has it.

    Folders of other things stay out, but for chat templates and the parts of a model of
    sentence-transformers, such as 1_Pooling.
    """
    if PART_OF_MODEL.match(file):
        return not file.endswith(OTHER_WEIGHTS)
    if "/" in file:
        return False
    # How another tool has quantized it is read from files such as quantize_config.json.
    return file.endswith("config.json") or not matches(file, (*WEIGHTS_OF_ALL, *LEFT_OUT))


def gguf_models(files: Collection[str]) -> list[str]:
    """GGUF files that hold a language model, or parts of one."""
    names = ((file, file.rpartition("/")[2].lower()) for file in files)
    return [
        f for f, name in names if name.endswith(".gguf") and not re.search("mmproj|imatrix", name)
    ]


def stem_of(file: str) -> str:
    """A GGUF file's name without its ending and the number of its part."""
    return PART.sub("", file.removesuffix(".gguf"))


def variant_of(file: str) -> str:
    """The quantization that a GGUF file's name ends with: "Q4_K_M", "UD-Q4_K_XL"."""
    found = re.search(r"(?:^|[-./])((?:UD-)?[A-Za-z0-9_]+)$", stem_of(file))
    return found[1] if found else stem_of(file)


def gguf_files(name: Name, files: Collection[str]) -> list[str]:
    """The parts of one GGUF model of a repository, in order."""
    wanted = (name.variant or "").removesuffix(".gguf").lower()
    models = gguf_models(files)
    found = [
        f
        for f in models
        if variant_of(f).lower() == wanted or stem_of(f.rpartition("/")[2]).lower() == wanted
    ]
    several = sorted(set(map(stem_of, found)))
    if len(several) == 1:
        return sorted(found)
    if several:
        names = ", ".join(stem.rpartition("/")[2] for stem in several)
        raise InvalidInput(f"{name} has several GGUF files of {name.variant}: {names}; name one")
    there = ", ".join(sorted(set(map(variant_of, models))))
    raise InvalidInput(
        f"{name} has no GGUF file of {name.variant}; "
        + (f"there are {there}" if there else "none is there")
    )


# Errors, and the other way.


@contextmanager
def told(name: Name) -> Iterator[None]:
    """Turn errors of huggingface_hub, and of the network below it, into a line with a remedy.

    Raises:
        FileNotFoundError: The hub has no such model or revision.
        InvalidInput: The hub refuses to give it.
        Unsupported: The hub cannot be reached.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub = constants.ENDPOINT
    remedy = (
        f"on a machine with network: hf download {name.repository} --local-dir DIR; then give DIR"
    )
    try:
        yield
    except AnybitError:
        raise
    except GatedRepoError:
        raise InvalidInput(
            f"{name} is gated: accept its conditions on {hub}/{name.repository}, then log in with "
            "`hf auth login`, or set HF_TOKEN"
        ) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise FileNotFoundError(
            f"{name} does not exist, neither here nor on {hub}{meant(name)}; if it is private, log "
            "in with `hf auth login`, or set HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise FileNotFoundError(f"{name.repository} has no revision {name.revision!r}") from None
    except OfflineModeIsEnabled:
        raise Unsupported(
            f"{name} does not exist here{meant(name)}, nor in the hub's cache, and HF_HUB_OFFLINE "
            f"forbids to ask; {remedy}"
        ) from None
    except Exception as error:  # the classes of the network's errors change between versions
        if is_disk_full(error):
            raise
        raise Unsupported(
            f"{name} does not exist here{meant(name)}, and {hub} cannot be asked "
            f"({in_a_line(error)}); {remedy}"
        ) from error


def meant(name: Name) -> str:
    """A path of a similar name, as a question."""
    path = Path(name.repository)
    around = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, around, 1)
    return f" (did you mean {path.parent / close[0]}?)" if close else ""


def check_push(repository: str) -> None:
    """Raise what would keep a model from being pushed, before it is made.

    Raises:
        InvalidInput: The name is none, or the hub does not know the token.
        Unsupported: The hub cannot be reached.
    """
    from huggingface_hub import HfApi, get_token

    found = NAME.fullmatch(repository)
    if found is None or found[2] or found[3]:
        raise InvalidInput(f"{repository!r} cannot be pushed to; give ORG/NAME")
    login = "log in with `hf auth login`, or set HF_TOKEN"
    if get_token() is None:
        raise InvalidInput(f"pushing to {repository} needs a token with write access: {login}")
    try:
        HfApi().whoami()
    except Exception as error:
        if getattr(getattr(error, "response", None), "status_code", None) == 401:
            raise InvalidInput(f"the hub does not know this token; {login}") from None
        raise Unsupported(f"the hub cannot be asked ({in_a_line(error)}); push later") from error


def push(path: Path, repository: str) -> str:
    """Upload a directory, or a file, to a repository, which is made, private, if there is none.

    Returns:
        Its address.

    Raises:
        Unsupported: The hub does not take it.
    """
    from huggingface_hub import HfApi

    api, message = HfApi(), "Upload with anybit"
    try:
        url = api.create_repo(repository, private=True, exist_ok=True)
        if path.is_dir():
            api.upload_folder(repo_id=repository, folder_path=path, commit_message=message)
        else:
            api.upload_file(
                repo_id=repository,
                path_or_fileobj=path,
                path_in_repo=path.name,
                commit_message=message,
            )
    except Exception as error:
        why = in_a_line(error.__cause__ or error)
        raise Unsupported(
            f"{path} is complete, but pushing it failed ({why}); try again with: "
            f"hf upload {repository} {path}"
        ) from error
    return str(url)
