"""The interactive terminal: an ACP client that shows any agent's turns. `crow_terminal.chat` starts it."""
