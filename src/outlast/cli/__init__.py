"""Command line of Outlast, one file for each command."""
