"""Template process: imports torch once and forks the workers of its host (template.md)."""
