"""The command line."""

from anybit.cli.app import main

__all__ = ["main"]
