"""Declares options, checks them, and reads them from TOML."""
