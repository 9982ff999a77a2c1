"""DP training: sampling, clipping, noise, and the methods built on them.

Importing this package does not import torch; its modules do when they are used.
"""
