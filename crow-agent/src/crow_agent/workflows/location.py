"""The location of the workflows."""

from collections.abc import Mapping

from crow_system.files import make_private_folder


def find_url(env: Mapping[str, str] | None = None) -> tuple[str, str]:
    """Find the database of the workflows: PostgreSQL as configured for sessions, else a file next to crow's own.

    Return its URL, and how often SQLite waits for the disk.
    """
    import os

    from crow_agent.settings.config import get_database_url, load_config, load_environment
    from crow_agent.settings.home import Home

    env = os.environ if env is None else env
    home = Home.find(env)
    config, _ = load_config(home, env), load_environment(home, env)
    url = get_database_url(config, home).partition("?")[0]
    if not url.startswith("sqlite"):
        return config.database.url, ""
    make_private_folder(home.data)
    return f"sqlite:///{home.data / 'workflows.db'}", config.database.synchronous
