"""Every message, prompt version, render and decision in SQL; `extension` lets a `Crow` use it."""
