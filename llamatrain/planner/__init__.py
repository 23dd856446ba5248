"""Forecasts memory and time of a run from its `StepSpec`, before it starts."""
