"""Every message, prompt version, render and decision in SQL."""
