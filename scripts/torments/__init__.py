"""The kinds of trials of `torture.py`, and what they share."""

import os

os.environ.setdefault(
    "OPENBLAS_NUM_THREADS", "1"
)  # before anything else: a process with threads could not be forked
