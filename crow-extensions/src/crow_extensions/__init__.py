"""The small extensions that ship with crow. They use the hooks of `Crow`, never each other."""
