"""Processes of one host: the agent, its workers, and the monitors of both."""
