"""Settings of the server, from flags, environment and a file."""

import argparse

DEFAULTS = {"host": "localhost", "port": 8000, "retries": 3, "verbose": False}


def load(argv, environment, file):
    """Return the settings: `argv` is a list of arguments, the other two are dicts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--retries", type=int)
    parser.add_argument("--verbose", action=argparse.BooleanOptionalAction)
    flags = parser.parse_args(argv)

    settings = {}
    for name, default in DEFAULTS.items():
        variable = environment.get(f"SERVER_{name.upper()}")
        value = variable or getattr(flags, name) or file.get(name) or default
        settings[name] = type(default)(value)
    return settings
