"""One training run: options, request, inputs, resolved config, memory plan, loop, result."""
