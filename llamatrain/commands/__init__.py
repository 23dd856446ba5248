"""The work of commands other than training."""
