"""Forecasts memory and time of a run before it starts. Numbers in, plans out: nothing here knows options."""
