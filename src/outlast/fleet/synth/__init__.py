"""Synthetic clusters whose ground truth is known, shaped like RSC-1 and RSC-2."""
