"""A store of sessions in SQL: every message, prompt version, render, model call and decision. See `extension`."""
