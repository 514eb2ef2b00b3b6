"""Settings of the server, from flags, environment and a file."""

import argparse

DEFAULTS = {"host": "localhost", "port": 8000, "retries": 3, "verbose": False}
WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


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
        flag = getattr(flags, name)
        variable = f"SERVER_{name.upper()}"
        if flag is not None:
            settings[name] = flag
        elif environment.get(variable):
            settings[name] = parse(variable, environment[variable], type(default))
        else:
            settings[name] = file.get(name, default)
    return settings


def parse(variable, text, kind):
    """Return the value of a variable; raise ValueError where it cannot be read."""
    try:
        return WORDS[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise ValueError(f"{variable} cannot be {text!r}") from None
