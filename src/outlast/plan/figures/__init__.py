"""Figures of `outlast plan`, in one style. They need matplotlib."""
