"""Text that every installation of CPython carries, to calibrate and to evaluate with.

Perplexity needs text that the model was not trained on. The source of the standard library is
on every machine that runs this package, so two fixed lists of its modules serve: `HELD_OUT` for
evaluation (kept out of the training data of ``models/pico``) and `CALIBRATION` for calibration.
English prose is there as well: the language reference that `help()` shows, every other topic of
which is for calibration. All texts differ a little between versions of Python; compare figures
within one version.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

HELD_OUT: tuple[str, ...] = (
    "argparse",
    "statistics",
    "fractions",
    "heapq",
    "textwrap",
    "tempfile",
    "configparser",
    "ipaddress",
    "calendar",
    "plistlib",
    "gettext",
    "uuid",
    "selectors",
    "csv",
    "fileinput",
    "shelve",
    "shlex",
    "graphlib",
    "sched",
    "colorsys",
    "html.parser",
    "http.cookies",
    "logging.handlers",
    "tomllib._parser",
)
"""Modules for evaluation only: no model of this project is trained or calibrated on them."""

CALIBRATION: tuple[str, ...] = (
    "dataclasses",
    "difflib",
    "enum",
    "functools",
    "mailbox",
    "optparse",
    "pickle",
    "pprint",
    "random",
    "shutil",
    "smtplib",
    "socketserver",
    "subprocess",
    "threading",
    "traceback",
    "weakref",
    "asyncio.tasks",
    "email.generator",
    "http.client",
    "json.encoder",
    "urllib.parse",
    "xmlrpc.client",
)
"""Modules to calibrate with; disjoint from `HELD_OUT`."""

_MIN_MODULES = 12


def module_path(name: str) -> Path:
    """Where the running interpreter keeps the source of the standard module `name`."""
    return Path(sysconfig.get_path("stdlib"), *name.split(".")).with_suffix(".py")


def _read(names: Sequence[str]) -> list[tuple[str, str]]:
    texts = [
        (name, path.read_bytes().decode("utf-8"))
        for name in names
        if (path := module_path(name)).is_file()
    ]
    if len(texts) < _MIN_MODULES:
        raise FileNotFoundError(
            f"the standard library at {sysconfig.get_path('stdlib')} holds the source of only "
            f"{len(texts)} of {len(names)} modules (at least {_MIN_MODULES} are needed); "
            "use a Python installed with its sources, or pass your own text"
        )
    return texts


def held_out_text() -> list[tuple[str, str]]:
    """Name and source of each module of `HELD_OUT`, in that order.

    A module that this Python lacks is left out; fewer than 12 raise `FileNotFoundError`.
    """
    return _read(HELD_OUT)


def calibration_text() -> list[tuple[str, str]]:
    """Name and source of each module of `CALIBRATION`, in that order.

    A module that this Python lacks is left out; fewer than 12 raise `FileNotFoundError`.
    """
    return _read(CALIBRATION)


def prose(held_out: bool) -> list[str]:
    """Topics of Python's language reference: those for evaluation, or those for calibration.

    Raises:
        FileNotFoundError: This Python was installed without them.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise FileNotFoundError(
            "this Python was installed without its documentation (pydoc_data); pass your own text"
        ) from None
    return list(dict.fromkeys(topics[name] for name in sorted(topics)))[held_out::2]
