"""Readers of data files: compression, JSON, tables and text."""
