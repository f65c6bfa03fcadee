"""Where samples come from: files of the kernel, tools, the driver. All run in child processes."""
