"""Keys of models in the system's keyring: `api_key = "keyring:NAME"` in `config.toml`."""

import asyncio

from crow_core.errors import ConfigError

PREFIX = "keyring:"
"""The start of an `api_key` that names an entry of the keyring."""

SERVICE = "crow"
"""The service under which crow's entries are stored."""


async def read_key(api_key: str, place: str) -> str:
    """Return the key that a setting names: of the keyring, or the setting itself. `place` is the setting's table.

    The keyring is read in a thread, because it may wait for the user to unlock it. Raises ConfigError.
    """
    if not api_key.startswith(PREFIX):
        return api_key
    return await asyncio.to_thread(load, api_key.removeprefix(PREFIX), place)


def load(name: str, place: str) -> str:
    """Return an entry of the keyring. Raises ConfigError if there is none, or if there is no keyring."""
    import keyring  # takes as long to import as all other settings to read, and few need it
    from keyring.errors import KeyringError

    try:
        key = keyring.get_password(SERVICE, name)
    except KeyringError as error:
        why = str(error).split("\n")[0].rstrip(".") or type(error).__name__
        raise ConfigError(
            f"{place} has its key in the system's keyring, which cannot be read here ({why}). "
            "Unlock it, or run `crow setup --store file`."
        ) from error
    if not key:
        raise ConfigError(f"{place}: the system's keyring has no entry {name!r} of {SERVICE!r}. Run `crow setup`.")
    return key


def has_keyring() -> bool:
    """True if this system has a keyring that works."""
    import keyring  # see `load`

    return keyring.get_keyring().priority >= 1  # a placeholder has a lower priority


def store(name: str, key: str) -> bool:
    """Store a key in the keyring, and return whether it can be read back."""
    import keyring  # see `load`
    from keyring.errors import KeyringError

    try:
        keyring.set_password(SERVICE, name, key)
        return keyring.get_password(SERVICE, name) == key
    except KeyringError:
        return False
