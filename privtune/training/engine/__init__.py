"""Fast training of many candidates at once: clipped sums, each kernel checked on made-up records."""
