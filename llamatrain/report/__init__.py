"""Reports of a run: terminal, metrics files, plots, HTML pages."""
