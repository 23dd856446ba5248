"""Programs of other libraries that the benchmarks time; another Python may run them."""
