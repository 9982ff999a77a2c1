"""Speed, checked rather than trusted: clipped sums of many candidates at once."""
