"""Greetings."""

WORDS = {"en": "Hello", "de": "Hallo", "fr": "Bonjour"}


def greet(name, polite=False, language="en"):
    """Return a greeting in a language; raise ValueError where we do not know the language."""
    if language not in WORDS:
        raise ValueError(f"we do not speak {language}")
    address = f"dear {name.strip()}" if polite else name.strip()
    return f"{WORDS[language]}, {address}."


def greet_all(names, polite=False, language="en"):
    """Return a greeting for each name, one a line."""
    return "\n".join(greet(name, polite=polite, language=language) for name in names)
