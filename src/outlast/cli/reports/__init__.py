"""Commands that show a run, live or after its end; they read its event files only."""
