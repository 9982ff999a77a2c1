"""The mechanism behind the privacy guarantee: schedule, sampling, clipping, noise and transcript."""
