"""Lessons: what went wrong in stored sessions, and the lines of instructions that could prevent it."""
