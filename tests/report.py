"""What a run of tests tells: each failure when it happens, and the files that took longest."""

import os
from collections import Counter
from collections.abc import Generator

import pytest

SLOW = 30.0  # seconds of CPU time, from which on a file is named


class Report:
    """A plugin of pytest; with pytest-xdist, one in each worker and one that collects.

    Attributes:
        spent: Seconds of CPU time of every file, with processes that its tests waited for.
    """

    def __init__(self, config: pytest.Config):
        self.config = config
        self.spent: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        before = sum(os.times()[:4])
        try:
            return (yield)
        finally:
            self.spent[item.nodeid.partition("::")[0]] += sum(os.times()[:4]) - before

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None and not hasattr(self.config, "workerinput"):
            line = f"FAILED {report.nodeid} ({report.when}): {reason(report)}"
            terminal.write(f"\n{line}\n", flush=True)  # behind the dots of those before

    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["spent"] = dict(self.spent)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        self.spent.update(getattr(node, "workeroutput", {}).get("spent", {}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        slow = [(file, seconds) for file, seconds in self.spent.most_common() if seconds > SLOW]
        if slow:
            total = sum(self.spent.values())
            terminalreporter.section(f"{total:.0f} s of CPU time; files that took over {SLOW:.0f}")
            for file, seconds in slow:
                terminalreporter.write_line(f"{seconds:7.1f} s  {file}")


def reason(report: pytest.TestReport) -> str:
    """The error's first line, or the last one of what is known of a process that ended."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else str(report.longrepr)).strip().splitlines() or [""]
    return str(lines[0 if crash else -1])[:300]
