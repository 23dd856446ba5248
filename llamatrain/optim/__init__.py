"""Optimizers, learning-rate schedules, and stop rules."""
