"""The version of anybit."""

__version__ = "0.1.0"
