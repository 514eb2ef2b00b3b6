"""Tools that search files, built on ripgrep."""
