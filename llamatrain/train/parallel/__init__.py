"""Sharding of a step among ranks: partition, accumulation, reduction and gathering."""
