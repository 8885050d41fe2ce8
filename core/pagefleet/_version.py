"""The version, on its own so that printing it imports nothing else. The build reads it from here."""

__version__ = "0.1.0"
