"""Outside the workers: torchrun's command line, processes, the agent, the controller's shell."""
