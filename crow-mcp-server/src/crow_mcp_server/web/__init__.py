"""Tools that read and search the web."""
