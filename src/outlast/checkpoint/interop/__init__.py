"""Import and export of other formats: DCP, safetensors, torch.save."""
