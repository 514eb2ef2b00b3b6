"""Evaluation: tasks by prompt versions, models and repetitions, run by agents, checked, stored and compared."""
