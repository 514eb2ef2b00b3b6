"""Histories of other agents: each module reads the files of one of them. Nothing in them is executed or trusted."""
