"""A clinic: patients, their visits, and bills."""
