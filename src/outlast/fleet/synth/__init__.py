"""Synthetic clusters with known ground truth, shaped like RSC-1 and RSC-2."""
