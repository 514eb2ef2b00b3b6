"""Read files and the environment into values."""
