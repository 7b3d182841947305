"""Fine-tuning: tasks, their data and metrics, and the run that they share."""
