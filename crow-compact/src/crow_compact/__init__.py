"""Compaction: shorten the context of long sessions by cutting old tool outputs and asking for summaries."""
