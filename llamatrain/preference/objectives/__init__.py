"""The preference objectives, one per file. A new one also needs an entry in `registry.OBJECTIVES`."""
