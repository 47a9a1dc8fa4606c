"""Directories that one run holds at a time."""

import errno
import os
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from anybit.errors import InvalidInput
from anybit.files.directory import destination, held, new_directory, written_whole

BUSY = "another run is writing into .*work; wait for its end"


def test_a_directory_that_comes_or_goes_meanwhile_is_held_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, open_ = tmp_path / "work", os.open

    def gone_before(path: Path, flags: int) -> int:
        work.rmdir()
        return open_(path, flags)

    def gone_after(path: Path, mode: int) -> None:
        raise FileExistsError(path)

    for name, change in (("open", gone_before), ("mkdir", gone_after)):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, change)
            with pytest.raises(InvalidInput, match=BUSY), held(work):
                pass
    with held(work), pytest.raises(InvalidInput, match=BUSY), held(work):
        pass
    assert not any(tmp_path.iterdir())


def test_runs_that_begin_and_end_at_once_hold_it_one_by_one(tmp_path: Path) -> None:
    work, inside, wrong = tmp_path / "work", threading.Lock(), []

    def run(number: int) -> None:
        for turn in range(100):
            try:
                with suppress(InvalidInput), held(work):
                    if not inside.acquire(blocking=False):
                        raise AssertionError("two runs hold it")
                    inside.release()
                    work.rename(tmp_path / f"{number}-{turn}")
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not work.exists()


@pytest.mark.parametrize("system", [os.name, "nt"])
def test_it_is_removed_if_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str
) -> None:
    if system != os.name:
        monkeypatch.setattr("anybit.files.directory.os", SimpleNamespace(name=system))
    work = tmp_path / "deep" / "work"
    with suppress(KeyError), held(work):
        assert work.is_dir()
        raise KeyError
    assert not work.exists()
    with suppress(KeyError), held(work):
        (work / "shard").touch()
        raise KeyError
    assert (work / "shard").is_file()
    with held(work):
        work.rename(tmp_path / "done")
    assert (tmp_path / "done" / "shard").is_file()


def test_a_file_in_its_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "work").touch()
    with pytest.raises(FileExistsError, match="work"), held(tmp_path / "work"):
        pass


def test_what_cannot_be_replaced_leaves_the_finished_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bind mount of the same file system looks like any directory until it is renamed."""
    out, rename = tmp_path / "out", os.rename
    out.mkdir()

    def stuck(source: Path, target: Path) -> None:
        if Path(source) == out:
            raise OSError(errno.EBUSY, "Device or resource busy")
        rename(source, target)

    monkeypatch.setattr(os, "rename", stuck)
    with (
        pytest.raises(InvalidInput, match="cannot be replaced") as caught,
        new_directory(out, True, 0) as temporary,
    ):
        (temporary / "model").touch()
    assert str(temporary) in str(caught.value)
    assert (temporary / "model").is_file()
    assert out.is_dir()


def test_a_path_stays_as_given_without_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tmp_path.resolve()
    monkeypatch.chdir(real)
    Path("link").symlink_to("target")
    assert destination("out/a") == Path("out/a")
    assert destination("link/a") == real / "target" / "a"
    assert destination("out/..") == destination(".") == real


def test_bytes_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "kernel"
    with written_whole(path) as file:
        file.write(b"one")
        assert not path.exists()
    assert path.read_bytes() == b"one"
    with pytest.raises(TypeError), written_whole(path) as file:
        file.writelines([b"t", "wo"])  # type: ignore[list-item]
    assert path.read_bytes() == b"one"
    assert list(tmp_path.iterdir()) == [path]
