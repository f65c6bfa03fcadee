"""Recovery policies as TOML files: presets, files of users, and what a job needs for them."""
