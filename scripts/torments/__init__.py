"""The kinds of trials that `torture.py` puts the command to, and what they share."""

import os

os.environ.setdefault(
    "OPENBLAS_NUM_THREADS", "1"
)  # before anything else: a process with threads could not be forked
