"""Launcher: torchrun's command line, worker processes, the agent and the controller's shell."""
