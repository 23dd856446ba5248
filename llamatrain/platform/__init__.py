"""The machine: processor, memory, terminal, temporary files, caches, threads and signals."""
