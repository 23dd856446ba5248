"""The kinds of trials that `torture.py` puts the command to, and what they share."""
