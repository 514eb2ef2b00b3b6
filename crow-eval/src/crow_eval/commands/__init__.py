"""The commands `crow eval`, `crow reask` and `crow import`."""
