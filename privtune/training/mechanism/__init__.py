"""What the guarantee rests on: schedule, sampling, clipping, noise, releases and their transcript."""
