"""Files on disk: mapped reading, atomic writing, and unfinished files."""
