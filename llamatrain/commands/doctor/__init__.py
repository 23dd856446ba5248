"""The checks of `llamatrain doctor`."""
