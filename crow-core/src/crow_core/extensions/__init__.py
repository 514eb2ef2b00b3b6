"""The extensions that ship with the core. They use the hooks of `Crow`, like everybody else's, and never each other."""
