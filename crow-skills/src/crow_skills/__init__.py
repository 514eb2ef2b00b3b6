"""Extensions that add files to the model's context: skills, AGENTS.md, mentioned files, commands from files."""
