"""Record the messages between an ACP client and an agent, and replay them."""
