"""Layouts of others, out and in: torch's distributed checkpoints (DCP) and safetensors."""
