"""Directories that one run holds at a time."""

import os
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from anybit.errors import InvalidInput
from anybit.files.directory import held

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
