"""Experiment loggers: a run's committed metrics for TensorBoard, W&B, MLflow and trackio."""
