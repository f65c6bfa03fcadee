"""Manifests that start `outlast run` in Kubernetes."""
