"""A GPU's context, made while packages are imported."""

import ctypes
import threading
from types import SimpleNamespace

import pytest

from anybit.kernels.context import begin_context
from anybit.serve.commands import importing


@pytest.mark.parametrize("failing", [None, "cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"])
def test_a_context_is_made_in_a_thread(
    failing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    called, ended = list[str](), threading.Event()

    def function(name: str) -> object:
        def call(*given: object) -> int:
            called.append(f"{name} {threading.current_thread().name}")
            return 100 * (name == failing)

        return call

    names = ("cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain")
    driver = SimpleNamespace(**{name: function(name) for name in names})
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    run = threading.Thread.run

    def until(self: threading.Thread) -> None:
        run(self)
        ended.set()

    monkeypatch.setattr(threading.Thread, "run", until)
    with importing():
        assert ended.wait(60)
    last = names.index(failing) if failing else 2
    assert called == [f"{name} anybit-context" for name in names[: last + 1]]


def test_without_a_driver_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    before = threading.active_count()
    begin_context()
    assert threading.active_count() == before
