"""The engine: schedules a graph, plans its memory, and runs it on a device."""
