"""Texts of others on the terminal: where commands look for it."""

from llamatrain.report.printable import printable as printable
