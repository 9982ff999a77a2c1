"""Where trials run: in this process, in other processes, on Ray or on SLURM."""
