"""The template process: it imports torch once, and forks the workers of its host (template.md)."""
