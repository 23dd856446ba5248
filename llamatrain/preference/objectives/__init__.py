"""The preference objectives, one per file. A file is found by its name, and holds `OBJECTIVE`."""
