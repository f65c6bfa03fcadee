"""Phases: functions that are run, undone, and run again until all ranks have completed them."""
