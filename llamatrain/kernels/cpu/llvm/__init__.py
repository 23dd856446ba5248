"""Innermost loops in LLVM's own words: imported by the compiler alone."""
