"""One engine a file, each with a class `Engine`: `load`, `run`, `close`. They run in the engine's own environment.

`serve.py` runs such a file by its path and answers JSON lines; only that engine, and no pagefleet, need be installed.
"""
