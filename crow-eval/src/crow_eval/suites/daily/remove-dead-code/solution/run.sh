rm old_format.py
