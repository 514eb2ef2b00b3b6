"""What stands in files enters the context of crow when it is needed: skills, AGENTS.md, mentions, commands."""
