"""State that the script keeps in its own variables: found, carried, or refused by name.

A phase, or the code between phases, may change globals, closure cells, locals of the function that
holds the loop, attributes and containers. Nobody gave them to `protect`, and a redo or a
replacement worker must have them nevertheless (docs/repeatability.md).
"""
