"""State in the script's own variables: detected, and carried or refused by name.

A phase, or the code between phases, may change globals, closure cells, locals of the function that
holds the loop, attributes and containers. A redo or a replacement worker needs this state although
it was not passed to `protect` (docs/repeatability.md).
"""
